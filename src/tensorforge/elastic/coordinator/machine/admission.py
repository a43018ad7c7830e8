"""Which streams are accepted: newcomers, workers that come back, and those that are refused."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.elastic.coordinator.journal_records import TermsFixed
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState, Phase
from tensorforge.elastic.coordinator.machine.departures import Departures
from tensorforge.elastic.coordinator.machine.generations import Generations
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.terms import differences

MAX_PARTICIPANTS = 20_000
"""How many workers and standbys one coordinator accepts."""


_MOST_GENERATIONS_AHEAD = 1_000_000
"""How far the hello of a worker that outlived a lost journal may move the counter of generations."""


class Admission:
    """Answers the `Hello` of every stream."""

    def __init__(
        self, state: ClusterState, departures: Departures, generations: Generations
    ) -> None:
        self._state = state
        self._departures = departures
        self._generations = generations

    def hello(self, connection: int, hello: messages.Hello, now: float) -> None:
        """Accept or refuse a new stream."""
        state = self._state
        known = state.roster.get(hello.worker.id)
        if hello.protocol != messages.PROTOCOL:
            why = (
                f"the worker speaks protocol {hello.protocol}, the coordinator {messages.PROTOCOL}"
            )
            state.out.refuse(connection, messages.REFUSED_INVALID, why)
        elif state.ended is not None:
            self._departures.tell_end(connection)
        elif known is not None and known.incarnation == hello.incarnation:
            self._welcome_back(known, connection, hello, now)
        elif known is not None and known.connection is not None:
            why = f"a connected worker has the id {hello.worker.id} ({known.worker})"
            state.out.refuse(connection, messages.REFUSED_DUPLICATE, why)
        else:
            if known is not None:
                self._departures.lose(known, "its process was replaced by another one", now, now)
            self._newcomer(connection, hello, now)

    def _newcomer(self, connection: int, hello: messages.Hello, now: float) -> None:
        state = self._state
        if hello.generation is not None:
            self._refuse_outdated(connection, hello.worker.id, hello.generation)
        elif len(state.roster) >= MAX_PARTICIPANTS:
            why = f"the coordinator has {MAX_PARTICIPANTS} workers and standbys, which is the limit"
            state.out.refuse(connection, messages.REFUSED_FULL, why)
        elif not self._accepts_config(connection, hello) or not self._accepts_terms(
            connection, hello
        ):
            return
        else:
            self._take_in(connection, hello, now)

    def _accepts_config(self, connection: int, hello: messages.Hello) -> bool:
        """Refuse a worker that was given another configuration than the run's."""
        state = self._state
        if hello.config is None or hello.config == state.config:
            return True
        why = differences(_options(hello.config), _options(state.config))
        text = f"{hello.worker.id} was given another configuration: {why}"
        state.out.refuse(connection, messages.REFUSED_TERMS, text)
        return False

    def _accepts_terms(self, connection: int, hello: messages.Hello) -> bool:
        """Refuse a worker whose terms are not the run's; the first worker of a run sets them.

        Other terms replace the run's only when nobody is here, and nobody may come back, who has its state.
        """
        state = self._state
        own = TermsFixed(terms=hello.terms, goal=hello.goal)
        is_nobodys = not len(state.roster) and not len(state.open_groups)
        if state.terms is None or (is_nobodys and state.terms != own):
            state.terms = own
            if state.generation:  # the terms of the first generation are journaled together with it
                state.out.record(own)
            return True
        why = differences(_facts(own), _facts(state.terms))
        if why:
            text = f"{hello.worker.id} does not fit to the run: {why}"
            state.out.refuse(connection, messages.REFUSED_TERMS, text)
        return not why

    def _refuse_outdated(self, connection: int, worker_id: str, generation: int) -> None:
        state = self._state
        if state.phase is Phase.GATHERING:
            # The worker has outlived a journal that is gone; its generations must not be used again.
            # One message moves the counter only so far, so that it cannot be driven to its end.
            most = state.generation + _MOST_GENERATIONS_AHEAD
            state.generation = max(state.generation, min(generation, most))
        why = (
            f"{worker_id} was removed since generation {generation}; the cluster is at "
            f"generation {state.generation}: join again as a newcomer"
        )
        state.out.refuse(connection, messages.REFUSED_FENCED, why)

    def _take_in(self, connection: int, hello: messages.Hello, now: float) -> None:
        state = self._state
        is_standby = not self._has_room()
        participant = Participant(hello.worker, hello.incarnation, joined_at=now, last_seen=now)
        participant.connection = connection
        participant.attributes = dict(hello.attributes)
        state.roster.add(participant)
        state.open_groups.name_reused(hello.worker)
        if hello.previous is not None:
            state.open_groups.stopped(hello.worker.id, hello.previous)
        if state.first_join is None:
            state.first_join = now
        state.last_change = now
        state.watch_silence(now)
        self._welcome(participant, connection)
        state.out.note("info", f"{hello.worker} joined" + (" as a standby" if is_standby else ""))

    def _has_room(self) -> bool:
        state = self._state
        if state.phase is Phase.GATHERING:
            return state.limit is None or len(state.roster.waiting) < state.limit
        return state.room() != 0

    def _welcome_back(
        self, participant: Participant, connection: int, hello: messages.Hello, now: float
    ) -> None:
        state = self._state
        if participant.worker != hello.worker:
            why = (
                f"{hello.worker.id} changed its address from {participant.worker} to {hello.worker}"
            )
            state.out.refuse(connection, messages.REFUSED_INVALID, why)
            return
        old = state.roster.connect(participant, connection)
        if old is not None:
            state.out.close(old)
        participant.last_seen = now
        participant.attributes = dict(hello.attributes)
        is_member = state.roster.is_member(participant.id)
        is_current = is_member and hello.generation == state.generation
        self._welcome(participant, connection, is_current=is_current)
        if (is_member and not is_current) or participant.is_leaving:
            self._generations.announce([participant], state.generation)
        if state.phase is Phase.FORMING and is_member:
            self._generations.send_formation((connection,))
        state.out.note("info", f"{participant.worker} reconnected")

    def _welcome(
        self, participant: Participant, connection: int, *, is_current: bool = False
    ) -> None:
        """Accept a stream. `is_current`: the worker knows the newest generation and is a member of it."""
        state = self._state
        if is_current:
            participant.known_generation = state.generation
        workers = state.roster.members if is_current else None
        welcome = messages.Welcome(
            generation=state.generation, workers=workers, config=state.config
        )
        state.out.send((connection,), welcome)


def _facts(terms: TermsFixed) -> dict[str, str]:
    goal = {} if terms.goal is None else {"goal": str(terms.goal)}
    return goal | terms.terms


def _options(config: ElasticTrainingConfig) -> dict[str, str]:
    values = asdict(config).items()
    return {n: str(value.value if isinstance(value, Enum) else value) for n, value in values}
