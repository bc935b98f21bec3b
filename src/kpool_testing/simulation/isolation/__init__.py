"""What belongs to one rank although a process has it once, and how each kind is kept apart.

Four mechanisms, one module each:

    swapped    follows the turn                 random generators, environment, warnings, switches, module globals
    worlds     looked up by the rank that asks  groups, torch's C++ group registry, meshes and what is cached by mesh
    compiled   guarded by the rank              what torch.compile has compiled
    refused    refused by name                  operators defined twice, two profilers, RPC, compiled autograd

`modes` carries the caller's thread-local modes into the ranks' threads, `backend` puts the simulated backend in place.
What is not kept apart is listed in the documentation of the toolkit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kpool_testing.simulation.context import Settings
from kpool_testing.simulation.isolation.attributes import places
from kpool_testing.simulation.isolation.backend import NAME as BACKEND
from kpool_testing.simulation.isolation.backend import installed
from kpool_testing.simulation.isolation.compiled import Compiled
from kpool_testing.simulation.isolation.forward_ad import shared_level
from kpool_testing.simulation.isolation.generators import TorchRandom, numpy_random, python_random
from kpool_testing.simulation.isolation.modes import CallerModes
from kpool_testing.simulation.isolation.refused import Refusals
from kpool_testing.simulation.isolation.settings import Environment, Warnings, directory, switches
from kpool_testing.simulation.isolation.swapped import Attributes, ModuleGlobals, Swapped
from kpool_testing.simulation.isolation.worlds import forget_groups, meshes_of_ranks
from kpool_testing.simulation.threads import adopted
from kpool_testing.simulation.turns import Turns

__all__ = ["BACKEND", "CallerModes", "Swapped", "apart", "forget_groups"]


@contextmanager
def apart(create: Callable[[Any], Any], settings: Settings, turns: Turns, modules: Sequence[str]) -> Iterator[Swapped]:
    """Keep the ranks of a run apart. Everything is put back to where it stood, however the run ends.

    Args:
        create: makes a simulated group from the options that torch hands to a backend.
        modules: names of modules whose globals every rank has for itself.
    """

    def rank_of() -> int | None:
        thread = turns.current()
        return None if thread is None else thread.rank.number

    with ExitStack() as stack:
        worlds = stack.enter_context(installed(create, settings.backend, settings.size, rank_of))
        stack.enter_context(meshes_of_ranks(rank_of))
        stack.enter_context(adopted(turns, worlds))
        stack.enter_context(shared_level(rank_of))
        random = [source for source in (python_random(), numpy_random()) if source is not None]
        swapped = Swapped(
            [
                TorchRandom(settings.seed),
                *random,
                Environment(settings.size),
                directory(),
                Warnings(),
                switches(),
                Compiled(settings.size, rank_of),
                Attributes(places()),
                Refusals(rank_of),
                *map(ModuleGlobals, modules),
            ]
        )
        stack.callback(swapped.restore)
        yield swapped
