"""A bound that no schedule beats: the least worker-seconds in which a batch can be generated, by linear programming."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, vstack

from flexfloor.world.costs import IterationCost

_MOST_READ_IMBALANCE = 1.1  # as in the formula of an iteration
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # limits of the classes that iterations fall into, then all requests
_FEW_BATCHES = (1, 16, 128)  # of fleets with so many workers that the program becomes large
_LARGE = 64
_TANGENTS = (0, 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)  # shares of the requests at which they touch
_SOLVER = 1e-6  # share of a result that the solver's tolerances may make up


@dataclass(frozen=True, slots=True)
class Work:
    """What a batch takes at least, whatever is done with it.

    iterations: that decode something: one for each token of the longest response but the first, which may come out of
    prefill. decoded: tokens that they make, of all responses likewise. own_kv, prompt_kv: context tokens that these
    read, of responses and of prompts. prefill: prompt tokens computed, once for each group of siblings, but for the
    last one, which may count as decoded. requests: how many there are. tangents: (a, b) such that any n iterations
    decode at most a·n + b tokens.
    """

    iterations: float
    decoded: float
    own_kv: float
    prompt_kv: float
    prefill: float
    requests: int
    tangents: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, prompt_tokens: np.ndarray, lengths: np.ndarray, groups: np.ndarray) -> Work:
        """One entry a request: tokens of its prompt and of its response, and a number that siblings share."""
        prompt, length = np.asarray(prompt_tokens, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
        _, first = np.unique(groups, return_index=True)
        return cls(
            iterations=float(length.max() - 1),
            decoded=float((length - 1).sum()),
            own_kv=float(((length - 1) * (length - 2) / 2).sum()),
            prompt_kv=float((prompt * (length - 1)).sum()),
            prefill=float((prompt[first] - 1).sum()),
            requests=len(length),
            tangents=_tangents(length - 1),
        )


def _tangents(decoded: np.ndarray) -> tuple[tuple[float, float], ...]:
    """n iterations give request i at most min(n, decoded_i) tokens. The sum is concave in n: tangents lie above it."""
    places = np.unique(np.quantile(decoded, _TANGENTS))
    longer = (decoded > places[:, None]).sum(axis=1)
    reached = np.minimum(decoded, places[:, None]).sum(axis=1)
    return tuple(zip(longer.astype(float).tolist(), (reached - longer * places).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Slopes:
    """What an iteration of m workers takes at least, in seconds; one entry for each size m in all arrays.

    With B decoded tokens, P prefilled ones and K context tokens read, over all workers:

        seconds ≥ base + kv·K + token·B + prefill·P + max[read(B), expert_token·B]
    """

    workers: np.ndarray
    base: np.ndarray
    kv: np.ndarray
    token: np.ndarray
    prefill: np.ndarray
    all_experts: np.ndarray  # seconds to read them
    missed: float  # share of the experts that a token does not touch
    expert_token: np.ndarray

    def chord(self, least: float, most: float) -> tuple[np.ndarray, np.ndarray]:
        """(at, slope), such that read(B) ≥ at + slope·B for B from `least` to `most`."""
        low, high = (self.all_experts * (1 - self.missed**tokens) for tokens in (least, most))
        slope = (high - low) / max(most - least, 1)
        return low - slope * least, slope


def iteration_slopes(cost: IterationCost, workers: np.ndarray) -> Slopes:
    """workers: sizes of the group, int [sizes].

    From the formula of `costs.seconds_core`: it grows with every maximum over the workers, and a maximum is at least
    the mean, B/m, P/m or K/m. Its share of experts that B + P tokens touch is at least the one that B tokens touch,
    read(B), which is concave and hence above its chords.
    """
    profile, shape = cost.profile, cost.shape
    m = np.asarray(workers, dtype=np.float64)
    experts, chosen = shape.all_expert_bytes, shape.top_k / shape.experts
    imbalance = np.where(m > 1, profile.imbalance, 1.0)
    share = np.maximum(1 / m, 1 / profile.cores)
    products = 2 * experts * chosen / shape.itemsize / profile.flops * np.maximum(imbalance / m, 1 / profile.cores)
    dense = 2 * (shape.dense_bytes - shape.lookup_bytes) / shape.itemsize / profile.flops * share
    base = cost.seconds(m, 0.0, 0.0, 0.0)
    rows = 1e6  # the time is linear in them where nothing is computed
    row = (cost.seconds(m, 0.0, 0.0, 0.0, 0.0, 0.0, rows) - base) / rows / m
    row += 2 * len(shape.moe_layers) * shape.hidden * shape.itemsize / profile.gather_link * (m > 1)
    most_share = np.maximum(np.minimum(imbalance, _MOST_READ_IMBALANCE) / m, 1 / profile.cores)
    return Slopes(
        workers=m,
        base=base,
        kv=shape.kv_token_bytes / profile.bandwidth / m,
        token=dense + row + profile.request_s * share,
        prefill=dense + row + products,
        all_experts=experts / profile.bandwidth * most_share,
        missed=1 - chosen,
        expert_token=products,
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

    Groups of m ∈ {least … workers} workers that hold all experts do n_mj iterations of class j, those that decode b_j
    to c_j tokens (b_0 = 1, c_j = b_(j+1)). In these they decode x_mj tokens and spend e_mj seconds on experts; in all
    their iterations they read k_m context tokens of responses and q_m of prompts, and prefill r_m tokens:

        minimise    Σ m·t_m   with   t_m = Σ_j (base·n_mj + token·x_mj + e_mj) + kv·(k_m + q_m) + prefill·r_m
        subject to  Σ n ≥ iterations, Σ x = decoded, Σ k = own_kv, Σ q = prompt_kv, Σ r = prefill, Σ t_m ≤ limit_s,
                    e_mj ≥ at_j·n_mj + slope_j·x_mj, e_mj ≥ expert_token·x_mj,
                    b_j·n_mj ≤ x_mj ≤ n_mj·min(c_j, m·max_batch), k_m ≤ capacity(m)·Σ_j n_mj,
                    Σ_(m, i ≥ j) x ≤ a·Σ_(m, i ≥ j) n + b   for every class j and tangent (a, b)

    Every schedule gives such numbers, and occupies at least Σ m·t_m: `iteration_slopes` bounds each iteration from
    below, and sums keep linear bounds. x counts tokens but for the first ones of responses, so that no request has more
    than one in an iteration: any set of n iterations has at most Σ_i min(n, decoded_i) of them, which is what says that
    the last iterations have few requests. Left out are resizes, requests computed again, imbalance, and of iterations
    that only prefill all but the tokens. Prompt pages are shared by siblings, which read them each: memory does not
    limit q_m. Returns inf where `limit_s` cannot be kept.
    """
    sizes = np.arange(least, workers + 1)
    capacity = kv_capacity(cost, sizes)
    sizes, capacity = sizes[capacity > 0], capacity[capacity > 0]
    if not len(sizes):
        return math.inf
    slopes = iteration_slopes(cost, sizes)
    limits = [b for b in (_BATCHES if len(sizes) <= _LARGE else _FEW_BATCHES) if b <= work.requests]
    classes = list(zip(limits, [*limits[1:], work.requests], strict=True))
    # In shares of the whole, so that all variables are of the order of one.
    whole = np.array([work.iterations, work.decoded, work.own_kv, work.prompt_kv, work.prefill])
    unit = np.maximum(whole, 1.0)
    one = np.ones(len(sizes))
    # Variables, each for all sizes: n, x and e of every class, then k, q and r.
    variables = 3 * len(classes) + 3
    ns, xs, es = (slice(first, 3 * len(classes), 3) for first in range(3))
    k, q, r = range(variables - 3, variables)

    spent = np.empty((variables, len(sizes)))
    spent[ns], spent[xs], spent[es] = slopes.base * unit[0], slopes.token * unit[1], one
    spent[k], spent[q], spent[r] = slopes.kv * unit[2], slopes.kv * unit[3], slopes.prefill * unit[4]

    own = np.zeros((4 * len(classes) + 1, variables, len(sizes)))  # Σ own · variables ≤ 0, for each size
    for index, (low, high) in enumerate(classes):
        n, x, e = range(3 * index, 3 * index + 3)
        read, multiply, most, fewest = own[4 * index : 4 * index + 4]
        at, slope = slopes.chord(low, high)
        read[n], read[x], read[e] = at * unit[0], slope * unit[1], -one
        multiply[x], multiply[e] = slopes.expert_token * unit[1], -one
        most[n], most[x] = -np.minimum(high, sizes * max_batch) * unit[0] / unit[1], one
        fewest[n], fewest[x] = low * unit[0] / unit[1] * one, -one
    own[-1, ns], own[-1, k] = -capacity * unit[0] / unit[2], one

    together = np.zeros((1 + len(classes) * len(work.tangents), variables))  # the same over all sizes, ≤ top
    top = np.empty(len(together))
    together[0, ns], top[0] = -1, -whole[0] / unit[0]
    for row, (index, (a, b)) in enumerate(product(range(len(classes)), work.tangents), 1):
        together[row, ns][index:], together[row, xs][index:] = -a * unit[0] / unit[1], 1
        top[row] = b / unit[1] * (1 + _SOLVER)
    totals = np.zeros((4, variables))
    totals[0, xs] = 1
    totals[1:, k:] = np.eye(3)

    rows = [_for_each_size(own), csr_array(np.kron(together, one))]
    tops = [np.zeros(own.shape[0] * len(sizes)), top]
    if math.isfinite(limit_s):
        rows.append(csr_array(spent.reshape(1, -1)))
        tops.append(np.array([limit_s * (1 + _SOLVER)]))
    found = linprog(
        (spent * sizes).reshape(-1),
        A_ub=vstack(rows),
        b_ub=np.concatenate(tops),
        A_eq=np.kron(totals, one),
        b_eq=whole[1:] / unit[1:],
        bounds=(0, None),
        method="highs",
    )
    return float(found.fun) * (1 - _SOLVER) if found.status == 0 else math.inf


def _for_each_size(coefficients: np.ndarray) -> coo_array:
    """[constraints, variables, sizes] → matrix [constraints · sizes, variables · sizes] of what each size has alone."""
    constraint, variable, size = np.nonzero(coefficients)
    constraints, variables, sizes = coefficients.shape
    places = constraint * sizes + size, variable * sizes + size
    return coo_array((coefficients[constraint, variable, size], places), (constraints * sizes, variables * sizes))
