"""The real fleet: worker processes running stock transformers models with expert parallelism and paged KV."""
