"""A bound that no schedule beats: the least worker-seconds in which a batch can be generated, by linear programming."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array, diags_array, vstack

from flexfloor.world.costs import IterationCost

_MOST_READ_IMBALANCE = 1.1  # as in the formula of an iteration
_SOLVER = 1e-6  # share of a result that the solver's tolerances may make up


@dataclass(frozen=True, slots=True)
class Work:
    """What a batch takes at least, whatever is done with it.

    iterations: of the longest response. decoded: tokens that decode iterations make: the first token of a response may
    come out of its prefill. own_kv, prompt_kv: context tokens that these read, of responses and of prompts.
    prefill: prompt tokens computed, once for each group of siblings, but for the last one, which may count as decoded.
    requests: how many there are.
    """

    iterations: float
    decoded: float
    own_kv: float
    prompt_kv: float
    prefill: float
    requests: int

    @classmethod
    def of(cls, prompt_tokens: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> Work:
        """One entry a request: tokens of its prompt and of its response, and a number that siblings share."""
        prompt, length = np.asarray(prompt_tokens, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
        _, first = np.unique(groups, return_index=True)
        return cls(
            iterations=float(length.max()),
            decoded=float((length - 1).sum()),
            own_kv=float(((length - 1) * (length - 2) / 2).sum()),
            prompt_kv=float((prompt * (length - 1)).sum()),
            prefill=float((prompt[first] - 1).sum()),
            requests=len(length),
        )


@dataclass(frozen=True, slots=True)
class Slopes:
    """What an iteration of m workers takes at least, in seconds; one entry for each size m in all arrays.

    With B decoded tokens, P prefilled ones and K context tokens read, over all workers and B + P ≥ 1:

        seconds ≥ base + kv·K + token·B + prefill·P + max[read + read_token·(B − 1), expert_token·B]
    """

    workers: np.ndarray
    base: np.ndarray
    kv: np.ndarray
    token: np.ndarray
    prefill: np.ndarray
    read: np.ndarray
    read_token: np.ndarray
    expert_token: np.ndarray


def iteration_slopes(cost: IterationCost, workers: np.ndarray, most: np.ndarray) -> Slopes:
    """workers: sizes of the group, int [sizes]; most: tokens that one iteration decodes at most on all of them.

    From the formula of `costs.seconds_core`: it grows with every maximum over the workers, and a maximum is at least
    the mean, B/m, P/m or K/m. Its share of experts that B + P tokens touch is concave in that number and at least the
    share that B tokens touch, hence above the chord from B = 1 to B = most (at B = 0, P ≥ 1 the chord is lower still);
    what prefill adds to the reading of experts is left out.
    """
    profile, shape = cost.profile, cost.shape
    m = np.asarray(workers, dtype=np.float64)
    experts, chosen = shape.all_expert_bytes, shape.top_k / shape.experts
    imbalance = np.where(m > 1, profile.imbalance, 1.0)
    share = np.maximum(1 / m, 1 / profile.cores)
    product = 2 * experts * chosen / shape.itemsize / profile.flops * np.maximum(imbalance / m, 1 / profile.cores)
    dense = 2 * (shape.dense_bytes - shape.lookup_bytes) / shape.itemsize / profile.flops * share
    base = cost.seconds(m, 0.0, 0.0, 0.0)
    rows = 1e6  # the time is linear in them where nothing is computed
    row = (cost.seconds(m, 0.0, 0.0, 0.0, 0.0, 0.0, rows) - base) / rows / m

    most_share = np.maximum(np.minimum(imbalance, _MOST_READ_IMBALANCE) / m, 1 / profile.cores)
    whole = experts / profile.bandwidth * most_share
    one, all_of_them = whole * chosen, whole * (1 - (1 - chosen) ** np.asarray(most, dtype=np.float64))
    return Slopes(
        workers=m,
        base=base,
        kv=shape.kv_token_bytes / profile.bandwidth / m,
        token=dense + row,
        prefill=dense + row + product,
        read=one,
        read_token=(all_of_them - one) / np.maximum(np.asarray(most) - 1, 1),
        expert_token=product,
    )


def kv_capacity(cost: IterationCost, workers: np.ndarray) -> np.ndarray:
    """Context tokens that groups of these sizes hold at most beside all experts; float64, negative where none."""
    profile, shape = cost.profile, cost.shape
    own = profile.memory_bytes - profile.reserve_bytes - shape.dense_bytes
    return (np.asarray(workers, dtype=np.float64) * own - shape.all_expert_bytes) / shape.kv_token_bytes


def least_occupied_s(
    cost: IterationCost, work: Work, *, workers: int, max_batch: int, limit_s: float = math.inf, least: int = 1
) -> float:
    """Worker-seconds below which no schedule of `work` stays that ends within `limit_s` seconds.

    Groups of m ∈ {least … workers} workers that hold all experts do n_m iterations, in which they decode x_m tokens,
    read k_m context tokens of responses and q_m of prompts, prefill r_m tokens, and spend e_m on experts:

        minimise    Σ m·t_m   with   t_m = base·n_m + kv·(k_m + q_m) + token·x_m + prefill·r_m + e_m
        subject to  Σ n_m ≥ iterations, Σ x_m = decoded, Σ k_m = own_kv, Σ q_m = prompt_kv, Σ r_m = prefill,
                    e_m ≥ read·n_m + read_token·(x_m − n_m), e_m ≥ expert_token·x_m,
                    x_m ≤ n_m·min(m·max_batch, requests), k_m ≤ n_m·capacity(m), Σ t_m ≤ limit_s

    Every schedule gives such numbers, and occupies at least Σ m·t_m: `iteration_slopes` bounds each iteration from
    below, and sums keep linear bounds. Left out are resizes, requests computed again, imbalance, and that the last
    iterations have few requests left. Prompt pages are shared by siblings, which read them each: memory does not limit
    q_m.
    Returns inf where `limit_s` cannot be kept.
    """
    sizes = np.arange(least, workers + 1)
    capacity = kv_capacity(cost, sizes)
    sizes, capacity = sizes[capacity > 0], capacity[capacity > 0]
    if not len(sizes):
        return math.inf
    most = np.minimum(sizes * max_batch, work.requests)
    slopes = iteration_slopes(cost, sizes, most)
    # In shares of the whole, so that all variables are of the order of one.
    whole = np.array([work.iterations, work.decoded, work.own_kv, work.prompt_kv, work.prefill])
    units = np.append(np.maximum(whole, 1.0), 1.0)
    none, one = np.zeros(len(sizes)), np.ones(len(sizes))
    seconds = np.array([slopes.base, slopes.token, slopes.kv, slopes.kv, slopes.prefill, one]) * units[:, None]
    at_most = [  # each for every size: Σ coefficient · variable ≤ 0, variables in the order n, x, k, q, r, e
        [slopes.read - slopes.read_token, slopes.read_token, none, none, none, -one],
        [none, slopes.expert_token, none, none, none, -one],
        [-one, 1 / most, none, none, none, none],
        [-one, none, 1 / capacity, none, none, none],
    ]
    own = block_array([[diags_array(c * u) for c, u in zip(row, units, strict=True)] for row in at_most])
    sums = np.kron(np.eye(6), one[None])
    together = [(-sums[0], -whole[0] / units[0])]
    if math.isfinite(limit_s):
        together.append((seconds.reshape(-1), limit_s * (1 + _SOLVER)))
    found = linprog(
        (seconds * sizes).reshape(-1),
        A_ub=vstack([own, csr_array(np.array([row for row, _ in together]))]),
        b_ub=np.concatenate([np.zeros(own.shape[0]), [top for _, top in together]]),
        A_eq=sums[1:5],
        b_eq=whole[1:] / units[1:5],
        bounds=(0, None),
        method="highs",
    )
    return float(found.fun) * (1 - _SOLVER) if found.status == 0 else math.inf
