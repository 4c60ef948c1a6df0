"""Rollouts: a policy plays many copies of a game, with engine and GPU working in parallel.

The copies are split into lanes. On a GPU, each lane has a thread, a stream and a CUDA graph, so the
engine can step one lane while the GPU selects actions for another. One replay of the graph reads
frames from pinned memory, runs the network, samples and stores actions, and sends them to the host.
On a CPU, the same code runs the lanes one after another.

All random numbers of a rollout are drawn before it starts, one per step, copy and action. A rollout
therefore depends only on the seed and the weights, not on the order of lanes or on CUDA graphs.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.envs.procgen import ACTIONS, FRAME, Games

WARM_UP = 3  # eager calls before capture, so that libraries are initialised


def scaled(frames: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Converts uint8 frames to network inputs in [0, 1]."""
    return frames.to(dtype) / 255


class Policy:
    """A network for playing; on a GPU, a copy in channels-last format, optionally in bf16."""

    def __init__(self, model: nn.Module, *, device: torch.device, bf16: bool = False):
        self.device, self.model, self.network = device, model, model
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        if device.type == "cuda":
            # the copy is not compiled, and its weights do not need a cast at every step
            self.network = copy.deepcopy(model).to(
                dtype=self.dtype, memory_format=torch.channels_last
            )

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the current weights of the model."""
        if self.network is not self.model:
            pairs = ((m.parameters(), m.buffers()) for m in (self.network, self.model))
            mine, theirs = (list(chain(*tensors)) for tensors in pairs)
            torch._foreach_copy_(mine, theirs)

    def __call__(self, frames: Tensor) -> Tensor:
        """Maps uint8 frames (N, 3, 64, 64) to float32 action logits and value (N, A + 1)."""
        return self.network(scaled(frames, self.dtype)).float()


class Lane:
    """Copies of a game that step together, with their columns of the player's memory."""

    def __init__(self, games: Games, policy: Policy, memory: dict[str, Tensor], *, capture: bool):
        self.games, self.policy, self.memory, self.device = games, policy, memory, policy.device
        first = games.reset()
        self.frames = self._host(torch.from_numpy(first.frames))
        self.actions = self._host(torch.zeros(games.count, dtype=torch.long))
        self.clock = torch.zeros(1, dtype=torch.long, device=self.device)
        self.returns: list[tuple[int, float]] = []  # (step, return) of finished episodes
        self.levels = first.levels.tolist()  # level seeds of episodes started since the last read
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream, self.decided = None, None
        if self.device.type == "cuda":
            # high priority, as the engine waits for actions even while the model trains
            self.stream = torch.cuda.Stream(self.device, priority=-1)
            # blocking waits are not slower, and free the CPU cores for other runs
            self.decided = torch.cuda.Event(blocking=True)
        if capture:
            self._record()

    def _host(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor.clone()

    @torch.no_grad()
    def play(self) -> None:
        """Fills the memory with one rollout; the last row holds the step after it."""
        with torch.cuda.stream(self.stream):  # no effect if None
            self.clock.zero_()
            self.returns = []
            frames, actions = self.frames.numpy(), self.actions.numpy()
            rewards, dones = (self.memory[name].numpy() for name in ("rewards", "dones"))
            for step in range(len(rewards)):
                self._wait_for_decision()
                seen = self.games.step(actions)
                np.copyto(frames, seen.frames)
                rewards[step], dones[step] = seen.rewards, seen.dones
                if seen.returns:
                    self.returns += [(step, value) for value in seen.returns]
                    self.levels += seen.levels[seen.dones].tolist()
            self._wait_for_decision()

    def _wait_for_decision(self) -> None:
        if self.graph is None:
            self._decide()
        else:
            self.graph.replay()
        if self.decided is not None:
            self.decided.record(self.stream)
            self.decided.synchronize()

    def _decide(self) -> None:
        """Selects actions for the frames on the host; everything else stays on the device."""
        frames = self.frames.to(self.device, non_blocking=True)
        outputs = self.policy(frames)
        logarithms = F.log_softmax(outputs[:, :ACTIONS], dim=-1)
        noise = self.memory["noise"].index_select(0, self.clock).squeeze(0)
        action = (logarithms.exp() / noise).argmax(-1)  # samples from the policy, as noise ~ Exp(1)
        self._keep("frames", frames)
        self._keep("actions", action)
        self._keep("log_probabilities", logarithms.gather(1, action[:, None]).squeeze(1))
        self._keep("values", outputs[:, -1])
        self.actions.copy_(action, non_blocking=True)
        self.clock.add_(1)

    def _keep(self, name: str, value: Tensor) -> None:
        # the step counter is on the device, as a CUDA graph cannot use one on the host
        self.memory[name].index_copy_(0, self.clock, value.unsqueeze(0))

    @torch.no_grad()
    def _record(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                self.clock.zero_()
                self._decide()
            self.clock.zero_()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._decide()


class Player:
    """All lanes, and the memory of their last rollout.

    Attributes:
        memory: frames, actions, log_probabilities, values and noise, (T + 1, N, ...) on the device;
            rewards and dones, (T, N) on the host. Row T is the step after the rollout, whose value
            is needed for advantages.
    """

    def __init__(
        self, games: Sequence[Games], policy: Policy, *, steps: int, capture: bool | None = None
    ):
        self.device = policy.device
        cuda = self.device.type == "cuda"
        count, where = sum(part.count for part in games), {"device": self.device}
        rows, host = (steps + 1, count), {"pin_memory": cuda}
        self.memory = {
            "frames": torch.zeros(*rows, *FRAME, dtype=torch.uint8, **where),
            "actions": torch.zeros(rows, dtype=torch.long, **where),
            "log_probabilities": torch.zeros(rows, **where),
            "values": torch.zeros(rows, **where),
            "noise": torch.ones(*rows, ACTIONS, **where),
            "rewards": torch.zeros(steps, count, **host),
            "dones": torch.zeros(steps, count, **host),
        }
        self.lanes, start = [], 0
        for part in games:
            columns = slice(start, start + part.count)
            memory = {name: value[:, columns] for name, value in self.memory.items()}
            self.lanes.append(
                Lane(part, policy, memory, capture=cuda if capture is None else capture)
            )
            start += part.count

    def draw(self, generator: torch.Generator) -> None:
        """Draws the random numbers of the next rollout."""
        self.memory["noise"].exponential_(generator=generator)

    @property
    def returns(self) -> list[float]:
        """Raw returns of the episodes that ended in the last rollout, earliest first."""
        ended = [each for lane in self.lanes for each in lane.returns]
        return [value for _, value in sorted(ended, key=lambda each: each[0])]

    def new_levels(self) -> list[int]:
        """Returns the level seeds of all episodes that started since the last call."""
        levels = [level for lane in self.lanes for level in lane.levels]
        for lane in self.lanes:
            lane.levels = []
        return levels


def play(player: Player) -> None:
    """Plays one rollout."""
    begin(player)()


def begin(player: Player) -> Callable[[], None]:
    """Starts a rollout, and returns a function that waits until it ends.

    On a GPU, all lanes play in threads, and the model may train at the same time. On a CPU, the
    policy is the model itself, which must not change, so `begin` returns after the rollout.
    """
    if player.device.type != "cuda":
        for lane in player.lanes:
            lane.play()
        return lambda: None
    for lane in player.lanes:  # weights and noise may still be pending on this stream
        lane.stream.wait_stream(torch.cuda.current_stream())
    threads = ThreadPoolExecutor(len(player.lanes))
    playing = [threads.submit(lane.play) for lane in player.lanes]

    def wait() -> None:
        with threads:
            for lane in playing:
                lane.result()  # raises the lane's error, if any

    return wait
