"""Leases: what Ray's books say a worker has, held by an actor of its own, so that it can be given up and taken again
while the worker's process lives. (A live actor cannot return what it reserved itself.)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flexfloor.errors import InputError
from flexfloor.fleets.engine.machine import Machine


@dataclass(frozen=True)
class Place:
    """Where a worker runs. machine.name: Ray's id of the node. devices: ids of its GPUs there, none on a CPU."""

    machine: Machine
    devices: tuple[str, ...] = ()


class _Holder:
    """The actor of a lease. It does nothing; what it reserves is what counts."""

    def place(self) -> Place:
        context = ray.get_runtime_context()
        machine = Machine(context.get_node_id(), ray.util.get_node_ip_address())
        return Place(machine, tuple(str(device) for device in context.get_accelerator_ids().get("GPU", ())))

    def hold(self) -> None:
        threading.Event().wait()


class Lease:
    """One CPU, and one GPU where asked for, until `drop`."""

    def __init__(self, actor: Any, place: Place) -> None:
        self.place = place
        self._actor = actor
        self._dropped = False

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Have `on_loss` called with a reason, from another thread, when Ray ends the lease."""

        def look(done: Any) -> None:
            if not self._dropped:  # Ray's own thread must not wait for Ray
                threading.Thread(target=on_loss, args=(one_line(done.exception()),), daemon=True).start()

        self._actor.hold.remote().future().add_done_callback(look)

    def drop(self) -> None:
        self._dropped = True
        if ray.is_initialized():
            ray.kill(self._actor)


def take_leases(
    workers: Sequence[int], gpus: int, patience: float, node: str | None = None, places: Sequence[Place] = ()
) -> list[Lease]:
    """A lease for each worker: on a node, or in places that they had before, or (without either) on as few nodes as
    have room for all.

    gpus: of a lease, 0 or 1. patience: seconds that all of it may take. Raises InputError, and nothing is held then.
    """
    deadline = time.monotonic() + patience
    held: dict[int, Lease] = {}
    wrong: list[Lease] = []
    try:
        if places:
            nodes = [place.machine.name for place in places]
        else:
            nodes = _find_room(len(workers), gpus, deadline) if node is None else [node] * len(workers)
        while missing := [i for i in range(len(workers)) if i not in held]:
            taken = _ask([nodes[i] for i in missing], gpus, deadline) if nodes else None
            if taken is None:
                raise InputError(_no_room([workers[i] for i in missing], gpus, patience), settings=("launcher",))
            for lease in taken:
                fits = (i for i in missing if i not in held and (not places or places[i] == lease.place))
                if (index := next(fits, None)) is None:
                    wrong.append(lease)  # another GPU of the machine: kept, so that the next one is not the same
                else:
                    held[index] = lease
    except BaseException:
        for lease in held.values():
            lease.drop()
        raise
    finally:
        for lease in wrong:
            lease.drop()
    return [held[i] for i in range(len(workers))]


def _find_room(count: int, gpus: int, deadline: float) -> list[str]:
    """Nodes for so many leases, few different ones; none once the deadline has passed.

    Ray's own way to place actors spreads them when a node is half full. Placement groups know better; but what one
    reserves cannot be given up piece by piece, so that it only shows where there is room.
    """
    group = placement_group([{"CPU": 1} | ({"GPU": gpus} if gpus else {})] * count, strategy="PACK")
    try:
        if not group.wait(max(0.0, deadline - time.monotonic())):
            return []
        return list(placement_group_table(group)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(group)


def _ask(nodes: Sequence[str], gpus: int, deadline: float) -> list[Lease] | None:
    """A lease on each node, all of them or, once the deadline has passed, none."""
    actors = []
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        holder: Any = ray.remote(_Holder).options(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy=where)
        actors.append(holder.remote())
    try:
        answers = [actor.place.remote() for actor in actors]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=max(0.0, deadline - time.monotonic()))
        if len(ready) == len(answers):
            return [Lease(actor, place) for actor, place in zip(actors, ray.get(answers), strict=True)]
    except RayError as error:
        _kill(actors)
        raise InputError(f"launcher 'ray': a lease cannot be had: {one_line(error)}", settings=("launcher",)) from None
    except BaseException:
        _kill(actors)
        raise
    _kill(actors)
    return None


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def _no_room(workers: Sequence[int], gpus: int, patience: float) -> str:
    free = ray.available_resources()
    needs, has = "a CPU", f"{free.get('CPU', 0):g} CPUs"
    if gpus:
        needs, has = f"{needs} and a GPU", f"{has} and {free.get('GPU', 0):g} GPUs"
    named = ", ".join(map(str, workers))
    return (
        f"launcher 'ray': worker{'s' * (len(workers) > 1)} {named} found no place within {patience:g} s; each needs "
        f"{needs}, on the machine where its process is if it has one, and Ray has {has} free in all: take fewer "
        "workers or a larger cluster"
    )


def one_line(error: BaseException | None) -> str:
    told = " ".join(str(error).split()) if error is not None else ""
    return told[:200] or type(error).__name__
