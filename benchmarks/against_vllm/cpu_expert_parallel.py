"""What vLLM 0.32 lacks on CPU for data parallel + expert parallel (DP with EP).

Two parts of vLLM's own CPU backend stop short of DP with EP; `install` completes both, and nothing else:

* `CpuCommunicator` has no `all_gatherv` and `reduce_scatterv`, with which tokens are sent to the experts and back.
  They are written here on vLLM's shared-memory collectives, or on Gloo.
* The CPU expert kernel ignores `expert_map`: it would index its local weights with global expert ids.
"""

import os

import torch

Sizes = list[int]


def install(transport: str = "shm") -> None:
    """Patch vLLM in this process; call it before the engine is built.  transport: `shm` or `gloo`."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if transport == "shm":
        _use_shared_memory(CpuCommunicator)
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUUnquantizedExperts.apply = _only_local_picks(CPUUnquantizedExperts.apply)


def all_gatherv(communicator, tensors, dim: int = 0, sizes: Sizes | None = None):
    """Concatenate the ranks' rows.  tensors: one tensor or a list, each [sizes[rank], ...] -> [sum(sizes), ...]."""
    assert dim == 0
    if isinstance(tensors, list):
        return [all_gatherv(communicator, tensor, dim, sizes) for tensor in tensors]
    world_size = communicator.world_size
    if world_size == 1:
        return tensors
    if tensors.dtype == torch.int32:  # the shared-memory kernel copies floats only: lend it the bits
        return all_gatherv(communicator, tensors.view(torch.float32), dim, sizes).view(torch.int32)
    rows = max(sizes) if sizes else tensors.shape[0]
    gathered = tensors.new_empty((world_size, rows, *tensors.shape[1:]))
    if rows > tensors.shape[0]:  # the collectives want equal shapes
        padded = tensors.new_empty((rows, *tensors.shape[1:]))
        padded[: tensors.shape[0]] = tensors
        tensors = padded
    communicator.dist_module.all_gather_into_tensor(
        gathered.flatten(0, 1), tensors.contiguous(), group=communicator.device_group
    )
    if sizes and min(sizes) < rows:
        return torch.cat([gathered[rank, :size] for rank, size in enumerate(sizes)])
    return gathered.flatten(0, 1)


def reduce_scatterv(communicator, tensor: torch.Tensor, dim: int = 0, sizes: Sizes | None = None) -> torch.Tensor:
    """Sum over the ranks and keep this rank's rows.  tensor: [sum(sizes), ...] -> [sizes[rank], ...]."""
    assert dim == 0
    world_size, rank = communicator.world_size, communicator.rank_in_group
    if world_size == 1:
        return tensor
    sizes = sizes or [tensor.shape[0] // world_size] * world_size
    total = tensor.contiguous()
    communicator.dist_module.all_reduce(total, group=communicator.device_group)
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]]


def _use_shared_memory(communicator_cls: type) -> None:
    """vLLM gives its shared-memory collectives to tensor- and pipeline-parallel groups only; give them to `dp` too."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original_init = communicator_cls.__init__  # type: ignore[misc]

    def __init__(self, *args, unique_name: str = "", **kwargs) -> None:
        original_init(self, *args, unique_name=unique_name, **kwargs)
        if unique_name.startswith("dp") and self.world_size > 1:
            os.environ["VLLM_DIST_IDENT"] = f"dp-{os.environ['VLLM_DP_MASTER_PORT']}"  # the segment's name, agreed
            self.dist_module = _CPUSHMDistributed(self)

    communicator_cls.__init__ = __init__  # type: ignore[misc]


def _only_local_picks(apply):
    """Give the kernel this rank's (token, expert) picks alone, each as a row of its own: no vain work."""

    def apply_locally(self, output, hidden_states, topk_weights, topk_ids, expert_map, **rest) -> None:
        if expert_map is None:
            picks = {"hidden_states": hidden_states, "topk_weights": topk_weights, "topk_ids": topk_ids}
            apply(self, output=output, expert_map=None, **picks, **rest)
            return
        slots = expert_map[topk_ids]
        token, pick = torch.nonzero(slots >= 0, as_tuple=True)
        output.zero_()
        if not len(token):
            return
        rows = hidden_states[token]
        picks = {
            "hidden_states": rows,
            "topk_weights": topk_weights[token, pick].unsqueeze(1),
            "topk_ids": slots[token, pick].unsqueeze(1).to(topk_ids.dtype),
        }
        results = torch.empty_like(rows)
        apply(self, output=results, expert_map=None, **picks, **rest)
        output.index_add_(0, token, results)

    return apply_locally
