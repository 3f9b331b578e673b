"""Workers of both roles, a gateway and its clients on one virtual clock; what a plan says happens to them."""

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from traceback import extract_tb

from pdserve.clock import VirtualClock
from pdserve.fabric.memory import MemoryFaults, MemoryNetwork
from pdserve.gateway.dispatcher import Work
from pdserve.ids import Incarnation, RequestId
from pdserve.sampling import SamplingParams
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.breakage import Breakage
from pdserve.simulate.client import Client
from pdserve.simulate.connection import ControlNetwork
from pdserve.simulate.gateway import Gateway
from pdserve.simulate.gateway_end import GATEWAY
from pdserve.simulate.journal import Journal
from pdserve.simulate.plan import Arrival, Plan
from pdserve.simulate.referee import Referee, RuleBroken
from pdserve.simulate.worker import Ground, Worker, WorkerShape
from pdserve.units import NS_PER_S, seconds_to_ns

QUIET_NS = 60 * NS_PER_S
"""All must have come to its end so long after the last fault: leases, cancels (10 s) and flushes (5 s) one after
another, some times over."""

RESTART_NS = NS_PER_S // 10
"""From the end of a process that was told to stop to its successor."""

LOOK_NS = NS_PER_S // 4
"""How often it is looked whether all is quiet."""


RETRY_MARK = "~"
"""In the name of a request that a client makes again."""


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    """What was broken, in a sentence."""
    about: str
    """The request it happened to, where there is one."""


class World:
    """Lifetime: until `close`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draw = random.Random(f"world {plan.seed}")
        self.journal = Journal()
        self.clock = VirtualClock(NS_PER_S)
        self.agenda = Agenda(self.clock)
        self.control = ControlNetwork(self.agenda, self.draw, self.journal)
        self.fabrics = MemoryNetwork(plan.seed, self.clock, self.write_faults())
        self.referee = Referee(self.fabrics.exposures)
        self._ground = Ground(
            model=plan.model,
            agenda=self.agenda,
            control=self.control,
            fabrics=self.fabrics,
            referee=self.referee,
            pump=self._pump,
            on_exit=self._exit,
        )
        self._num_incarnations = 0
        self._dead: list[Worker] = []
        self.gateway = self._start_gateway()
        self.workers: dict[str, Worker] = {}
        """By name; a dead one until its successor starts."""
        for name, shape in plan.workers:
            self.start(name, shape)
        self.clients: list[Client] = []
        for index, arrival in enumerate(plan.arrivals):
            self._add_client(f"request-{index:02}", arrival)
        breakage = Breakage(self)
        for fault in plan.faults:
            self.agenda.after(fault.at_ns, partial(breakage.begin, fault))

    def write_faults(self, *, slowness: int = 1, failure_probability: float = 0.0) -> MemoryFaults:
        return MemoryFaults(
            max_delay_ns=self.plan.max_write_delay_ns * slowness,
            reorder=self.plan.reorders_writes,
            write_failure_probability=failure_probability,
        )

    def run(self) -> Violation | None:
        """To its quiet end, or the first violation."""
        try:
            self._run()
        except RuleBroken as broken:
            return Violation(str(broken), broken.about)
        except Exception as error:  # whatever the code raises here, a worker or the gateway would have died of
            place = extract_tb(error.__traceback__)[-1]
            return Violation(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})", "")
        return None

    def close(self) -> None:
        for worker in [*self.workers.values(), *self._dead]:
            worker.close()

    def names_of(self, request_id: str) -> tuple[str, ...]:
        """What the journal may call a request: its name, which all its attempts begin with, and its handoffs."""
        name = request_id.partition(".")[0].partition(RETRY_MARK)[0]
        grants = self.referee.grants.values()
        return (name, *(f"handoff_id={grant.handoff_id}," for grant in grants if grant.request_id.startswith(name)))

    # What faults do

    def start(self, name: str, shape: WorkerShape) -> None:
        """A worker of this name, the first or a successor."""
        if name in self.workers:
            self._dead.append(self.workers[name])
        self.workers[name] = Worker(self._ground, name, self._new_incarnation(), shape)

    def process(self, name: str) -> Worker | Gateway:
        return self.gateway if name == GATEWAY else self.workers[name]

    def succeed(self, dead: Worker | Gateway) -> None:
        """Start another in the place of one that died, if nobody has."""
        if self.process(dead.name) is not dead:
            return
        if isinstance(dead, Gateway):
            self.gateway = self._start_gateway()
        else:
            self.start(dead.name, dead.shape)

    def audit(self) -> None:
        """Have the ledgers of all workers looked through."""
        for worker in self.workers.values():
            if worker.is_alive:
                self.referee.audit(worker)

    def kill(self, process: Worker | Gateway) -> None:
        self.control.lose(process)
        self._end(process)

    def exit_at_once(self, process: Worker | Gateway) -> None:
        """It was told to stop for the second time."""
        if process.is_alive:
            self.kill(process)
            self.agenda.after(RESTART_NS, partial(self.succeed, process))

    # Inside

    def _exit(self, process: Worker | Gateway) -> None:
        """It has drained, or the time for that is over."""
        self.journal.note(process.name, "exits")
        self.control.leave(process)
        self._end(process)
        self.agenda.after(RESTART_NS, partial(self.succeed, process))

    def _end(self, process: Worker | Gateway) -> None:
        process.kill()
        if isinstance(process, Gateway):
            for client in self.clients:
                if client.has_asked:
                    client.lose()
        else:
            self.fabrics.kill(process.fabric)
            self.referee.died(process)

    def _start_gateway(self) -> Gateway:
        return Gateway(
            self.agenda,
            self.control,
            incarnation=self._new_incarnation(),
            max_pending=self.plan.max_pending,
            on_exit=self._exit,
        )

    def _run(self) -> None:
        last_arrival_ns = max((arrival.at_ns for arrival in self.plan.arrivals), default=0)
        self._run_until(NS_PER_S + max(last_arrival_ns, self.plan.end_of_faults_ns))
        self._come_to_rest()
        self._require_local_losses()
        probes = [self._add_client(f"probe-{index}", probe) for index, probe in enumerate(self.plan.probes)]
        self._run_until(self.agenda.now_ns + NS_PER_S)
        self._come_to_rest()
        for client in probes:
            if client.endings != ["answered"]:
                raise RuleBroken(f"H10: after all faults {client.name} is {client.endings}", about=client.name)

    def _come_to_rest(self) -> None:
        """No more faults: everything comes to its end by itself, in bounded time (H6)."""
        stop_ns = self.agenda.now_ns + QUIET_NS
        while not self._is_quiet():
            if self.agenda.now_ns > stop_ns:
                self._require_quiet()
            self._run_until(self.agenda.now_ns + LOOK_NS)
            self.audit()

    def _run_until(self, stop_ns: int) -> None:
        while True:
            network_ns, agenda_ns = self.fabrics.next_ns(), self.agenda.next_ns
            is_network = network_ns is not None and (agenda_ns is None or network_ns <= agenda_ns)
            due_ns = network_ns if is_network else agenda_ns
            if due_ns is None or due_ns > stop_ns:
                break
            self._set_time(due_ns)
            if is_network:
                self._pump()
            else:
                self.agenda.do_next()
        self._set_time(stop_ns)

    def _set_time(self, now_ns: int) -> None:
        self.clock.advance_ns(max(0, now_ns - self.clock.now_ns()))
        self.journal.now_ns = self.clock.now_ns()

    def _pump(self) -> None:
        self.fabrics.pump()
        for worker in self.workers.values():
            if worker.runs:
                worker.poll()

    def _new_incarnation(self) -> Incarnation:
        self._num_incarnations += 1
        return Incarnation(self._num_incarnations)

    def _add_client(self, name: str, arrival: Arrival) -> Client:
        client = Client(
            Work(
                request_id=RequestId(name),
                prompt_token_ids=arrival.prompt,
                sampling=SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True),
                deadline_ns=self.agenda.now_ns + arrival.at_ns + arrival.timeout_ns,
                num_choices=arrival.num_choices,
            ),
            self.plan.model.layout,
        )
        if arrival.num_retries:
            client.on_refused = partial(self._come_again, name, arrival)
        self.clients.append(client)
        self.agenda.after(arrival.at_ns, partial(self._arrive, client))
        if arrival.leaves_after_ns is not None:
            self.agenda.after(arrival.at_ns + arrival.leaves_after_ns, partial(self._leave, client))
        return client

    def _come_again(self, name: str, arrival: Arrival, after_s: float) -> None:
        """The client of a refused request makes another when it was told to: all is as before, but for the time."""
        first, _, index = name.partition(RETRY_MARK)
        again = replace(arrival, at_ns=seconds_to_ns(after_s), num_retries=arrival.num_retries - 1)
        self._add_client(f"{first}{RETRY_MARK}{int(index or 0) + 1}", again)

    def _arrive(self, client: Client) -> None:
        self.journal.note("client", f"asks {client.name}")
        client.has_asked = True
        gateway = self.gateway
        if not gateway.is_alive:
            client.lose()
            return
        gateway.do(lambda: gateway.submit(client))
        if gateway.dispatcher.num_pending > self.plan.max_pending:
            raise RuleBroken(f"H6: {gateway.dispatcher.num_pending} requests are pending", about=client.name)

    def _leave(self, client: Client) -> None:
        self.journal.note("client", f"of {client.name} disconnects")
        gateway = self.gateway
        gateway.do(lambda: gateway.disconnect(client))

    def _leftovers(self) -> list[str]:
        waiting = [f"{client.name} has no ending" for client in self.clients if not client.endings]
        waiting += [f"{one.name} stops" for one in (self.gateway, *self.workers.values()) if _is_ending(one)]
        waiting += [f"{one.name} stands still" for one in (self.gateway, *self.workers.values()) if not one.runs]
        if self.gateway.dispatcher.num_pending:
            waiting.append(f"{self.gateway.dispatcher.num_pending} requests of the gateway")
        waiting += [f"no connection of {name} to the gateway" for name in self._names_without_gateway()]
        if self.control.num_ending:
            waiting.append(f"{self.control.num_ending} ends of connections under way")
        num_prefill = sum(worker.core.sender is not None for worker in self.workers.values())
        for worker in self.workers.values():
            waiting += self.referee.leftovers(worker)
            if worker.core.receiver is not None and worker.core.num_prefill_peers != num_prefill:
                waiting.append(f"{worker.name} has {worker.core.num_prefill_peers} of {num_prefill} prefill workers")
        return waiting

    def _names_without_gateway(self) -> list[str]:
        members = {member.incarnation for member in self.gateway.members.values()}
        return [name for name, worker in self.workers.items() if worker.incarnation not in members]

    def _require_local_losses(self) -> None:
        """H10: a request that met no fault is not told that its worker was lost."""
        touched = self.plan.touched
        for client in self.clients:
            if touched is not None and client.was_lost and not client.depends_on & touched:
                raise RuleBroken(f"H10: {client.name} is told 503 by {client.depends_on}", about=client.name)

    def _is_quiet(self) -> bool:
        return all(client.endings for client in self.clients) and not self._leftovers()

    def _require_quiet(self) -> None:
        about = next((client.name for client in self.clients if not client.endings), "")
        raise RuleBroken(
            f"H7: {QUIET_NS // NS_PER_S} s after the last fault there is left: {'; '.join(self._leftovers())}",
            about=about,
        )


def _is_ending(process: Worker | Gateway) -> bool:
    is_draining = process.is_draining if isinstance(process, Gateway) else process.core.is_draining
    return is_draining or not process.is_alive
