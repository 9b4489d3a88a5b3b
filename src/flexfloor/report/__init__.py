"""What people look at, made from the records of ledgers: report, trace, live view, TensorBoard."""
