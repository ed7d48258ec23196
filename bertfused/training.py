"""Training: the order of the data, one update, and the loop around it."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bertfused.batch import Batch, Example, collate
from bertfused.checkpoint import copy_tensors
from bertfused.config import LoopConfig, OptimConfig, Precision
from bertfused.errors import UserError
from bertfused.loss import Loss, cross_entropy
from bertfused.model import FusedTransformer
from bertfused.pretrained import PretrainedEncoder
from bertfused.schedule import drop_net_rate, learning_rate

_logger = logging.getLogger(__name__)

# Updates left out in a row, for a loss or gradient that is not finite, before giving up.
_MAX_SKIPPED = 10

Numbers = NDArray[np.int64]


@runtime_checkable
class Dataset(Protocol):
    """Examples by number, and the length of every stream: target, source, and BERT if any."""

    lengths: Sequence[NDArray[np.integer]]

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Example: ...
    def batches(
        self, batch_tokens: int, generator: np.random.Generator | None = None
    ) -> list[Numbers]:
        """Say which examples go together; in order and all of them without a generator."""
        ...


@runtime_checkable
class AnyBatch(Protocol):
    """What a loss module makes of some examples and computes its loss on."""

    @property
    def tokens(self) -> int: ...
    @property
    def positions(self) -> int: ...
    def to(self, device: torch.device) -> "AnyBatch": ...


@dataclass(frozen=True)
class Place:
    """A place in the data: an epoch, and what was used of it, as the training's steps count."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class Step:
    """The micro-batches of one update as example numbers, and the place after it."""

    examples: list[Numbers]
    target_tokens: int
    after: Place


def steps(
    dataset: Dataset,
    *,
    batch_tokens: int,
    accumulate: int,
    seed: int,
    start: Place,
) -> Iterator[Step]:
    """Yield updates for ever; the order within an epoch is a function of seed and epoch."""
    epoch, position = start.epoch, start.position
    while True:
        generator = np.random.default_rng([seed, epoch])
        batches = dataset.batches(batch_tokens, generator)
        for first in range(position, len(batches), accumulate):
            examples = batches[first : first + accumulate]
            end = first + len(examples)
            after = Place(epoch, end) if end < len(batches) else Place(epoch + 1)
            tokens = sum(int(dataset.lengths[0][batch].sum()) for batch in examples)
            yield Step(examples, tokens, after)
        epoch, position = epoch + 1, 0


class Stream:
    """The batches of one kind of example, epoch after epoch, by their number.

    Args:
        batches: Groups the examples, as many batches whatever the generator; None keeps the order.
        key: Of the orders, besides the epoch.
    """

    def __init__(
        self,
        batches: Callable[[np.random.Generator | None], list[Numbers]],
        key: tuple[int, ...],
    ) -> None:
        self._batches, self._key = batches, key
        self._size = len(batches(None))
        self._epoch, self._order = -1, [np.empty(0, dtype=np.int64)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Numbers:
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._batches(np.random.default_rng([*self._key, epoch]))
        return self._order[place]


@runtime_checkable
class Steps(Protocol):
    """Says which micro-batches each update consists of, as ``steps`` does."""

    def __call__(
        self, dataset: Any, *, batch_tokens: int, accumulate: int, seed: int, start: Place
    ) -> Iterator[Step]: ...


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which matrix products run in ``precision``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def choose_precision(precision: Precision, device: torch.device) -> str:
    """Return "bf16" for "auto" where the processor multiplies it faster than fp32."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    is_fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return "bf16" if is_fast else "fp32"


class LossModule(nn.Module, ABC):
    """Model and loss in one forward pass, as data-parallel training needs.

    Args:
        model: What is trained; ``begin_step`` sets its randomness.
        encoder: The pretrained encoder it reads, if it does.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, encoder: PretrainedEncoder | None) -> None:
        super().__init__()
        self.model = model
        self.encoder = encoder

    @abstractmethod
    def loss(self, batch: Any) -> Loss:
        """Compute the loss of what ``collate`` made."""

    @abstractmethod
    def begin_step(self, *key: int, drop_net: float) -> None:
        """Set the randomness of the next batch and of its pass, and the drop-net rate."""

    @abstractmethod
    def collate(self, dataset: Any, numbers: Numbers) -> AnyBatch:
        """Put examples of a data set together."""

    def take_values(self) -> dict[str, float]:
        """Return what else is worth logging of the batches since the last call."""
        return {}

    def forward(self, batch: Any) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the sums ``Loss.total`` and ``Loss.nll`` of a batch."""
        loss = self.loss(batch)
        return loss.total, loss.nll

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return each parameter that learns; those of the pretrained encoder begin "bert."."""
        named = dict(self.model.named_parameters())
        if self.encoder is not None:
            named |= {f"bert.{name}": p for name, p in self.encoder.named_parameters()}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


class TranslationLoss(LossModule):
    """The loss of a (fused) Transformer on pairs of sentences."""

    model: FusedTransformer

    def __init__(
        self,
        model: FusedTransformer,
        encoder: PretrainedEncoder | None,
        *,
        label_smoothing: float,
        mask_special: bool,
    ) -> None:
        super().__init__(model, encoder)
        self.label_smoothing = label_smoothing
        self.mask_special = mask_special

    def loss(self, batch: Batch) -> Loss:
        if self.encoder is not None:
            noise = self.model.noise if self.training else None
            batch = self.encoder.attach(batch, noise, mask_special=self.mask_special)
        mask, target = batch.target_mask, batch.target
        assert mask is not None and target is not None
        hidden = self.model.hidden(batch)[mask]
        return cross_entropy(hidden, self.model.output.weight, target[mask], self.label_smoothing)

    def collate(self, dataset: Dataset, numbers: Numbers) -> Batch:
        ids = None if self.encoder is None else self.encoder.bert_ids
        return collate([dataset[int(i)] for i in numbers], ids)

    def begin_step(self, *key: int, drop_net: float) -> None:
        self.model.begin_step(*key, drop_net=drop_net)


@dataclass(frozen=True)
class Update:
    """What is known of one update.

    Attributes:
        nll: Mean over its target tokens, in nats.
        norm: Norm of the gradient before clipping.
        padding: Share of padded positions on source and target, of this process's batches.
        is_finite: False if it was left out for a loss or gradient that is not finite.
    """

    nll: float
    tokens: int
    norm: float
    lr: float
    padding: float
    is_finite: bool


class Trainer:
    """Optimiser and averaged weights around a ``LossModule``.

    Args:
        drop_net: Drop-net rate and the steps over which it rises.
        fresh: Names of parameters that a warm start left fresh, for ``optim.new_lr_scale``.
        precision: "fp32", or "bf16" for matrix products only.
    """

    def __init__(
        self,
        module: LossModule,
        optim: OptimConfig,
        config: LoopConfig,
        *,
        drop_net: tuple[float, int] = (0.0, 0),
        fresh: Sequence[str] = (),
        device: torch.device,
        precision: str,
    ) -> None:
        self.module, self.device, self.precision = module, device, precision
        self.optim, self.config, self.drop_net = optim, config, drop_net
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        if config.accumulate % self.world:
            raise UserError(
                f"train.accumulate is {config.accumulate}, not a multiple of {self.world} processes"
            )
        self.parameters = module.trained_parameters()
        self.optimizer = torch.optim.AdamW(
            self._groups(set(fresh)),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.average: dict[str, Tensor] | None = None
        if optim.ema is not None:
            self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._parallel: nn.Module = module
        if self.world > 1:
            # Drop-net leaves branches uncomputed: not every parameter takes part in a step.
            is_fused = module.encoder is not None
            # Buffers are constants, and grow where they are needed: nothing to exchange.
            self._parallel = DistributedDataParallel(
                module, find_unused_parameters=is_fused, broadcast_buffers=False
            )

    def _groups(self, fresh: set[str]) -> list[dict[str, Any]]:
        groups = []
        for is_fresh, scale in ((False, 1.0), (True, self.optim.new_lr_scale)):
            members = [p for name, p in self.parameters.items() if (name in fresh) == is_fresh]
            if members:
                groups.append({"params": members, "lr_scale": scale})
        return groups

    def update(self, dataset: Dataset, step: Step, number: int) -> Update:
        """Sum the losses of a step, divide by its target tokens, clip, and move the weights.

        Args:
            number: The step this makes: 1, 2, ...
        """
        if not self.module.model.training:  # a validation or a translator came between
            self.module.train()
        self.optimizer.zero_grad()
        rate = drop_net_rate(number, drop_net=self.drop_net[0], warmup_steps=self.drop_net[1])
        nll = torch.zeros((), device=self.device)
        positions = real = 0
        rounds = math.ceil(len(step.examples) / self.world)
        for turn in range(rounds):
            # A process for which nothing is left repeats a batch with weight 0, so that all
            # take part in the exchange of gradients.
            micro = turn * self.world + self.rank
            weight = self.world / step.target_tokens if micro < len(step.examples) else 0.0
            micro = min(micro, len(step.examples) - 1)
            self.module.begin_step(self.config.seed, number, micro, drop_net=rate)
            batch = self.module.collate(dataset, step.examples[micro])
            positions, real = positions + batch.positions, real + batch.tokens
            with self._exchange(is_last=turn == rounds - 1):
                with autocast(self.device, self.precision):
                    total, batch_nll = self._parallel(batch.to(self.device))
                (total * weight).backward()
            nll += batch_nll * (weight > 0)
        if self.world > 1:
            dist.all_reduce(nll)
        lr = self._learning_rate(number)
        norm = self._clip()
        is_finite = bool(torch.isfinite(norm)) and bool(torch.isfinite(nll))
        if is_finite:
            self._move(number, lr)
        mean = float(nll) / step.target_tokens
        padding = 1 - real / positions
        return Update(mean, step.target_tokens, float(norm), lr, padding, is_finite)

    def _clip(self) -> Tensor:
        """Bound the gradient's norm by ``optim.clip_norm``; return what it was."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # A branch that drop-net left out has a zero gradient, not none: its moments decay
                # and weight decay applies, as with the official code's multiplication by zero.
                parameter.grad = torch.zeros_like(parameter)
        parameters = list(self.parameters.values())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.optim.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.optim.clip_norm, norm)
        return norm

    def _move(self, number: int, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.optimizer.step()
        if self.average is not None and self.optim.ema is not None:
            decay = min(self.optim.ema, (1 + number) / (10 + number))
            weights = [parameter.detach() for parameter in self.parameters.values()]
            torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)

    def _learning_rate(self, number: int) -> float:
        return learning_rate(
            number,
            schedule=self.optim.schedule,
            lr=self.optim.lr,
            warmup_steps=self.optim.warmup_steps,
            warmup_init_lr=self.optim.warmup_init_lr,
            max_steps=self.config.max_steps,
        )

    def agreed(self, seconds: float) -> float:
        """Return what the first process measured: all must pass train.max_minutes together."""
        if self.world == 1:
            return seconds
        shared = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0)
        return float(shared)

    def _exchange(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if is_last or not isinstance(self._parallel, DistributedDataParallel):
            return nullcontext()
        waiting: AbstractContextManager[Any] = self._parallel.no_sync()
        return waiting

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Put the averaged weights, if there are any, in place, and dropout off."""
        self.module.eval()
        if self.average is None:
            yield
            return
        trained = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        copy_tensors(self.average, self.parameters)
        try:
            yield
        finally:
            copy_tensors(trained, self.parameters)

    @torch.no_grad()
    def mean_loss(self, dataset: Dataset) -> Loss:
        """Return the summed loss over a data set, in fp32 and with the weights as they are.

        What is random in it (a context model's drafts) is the same every time.
        """
        total, nll, tokens = torch.zeros(()), torch.zeros(()), 0
        for number, numbers in enumerate(dataset.batches(self.config.batch_tokens)):
            self.module.begin_step(self.config.seed, 0, number, drop_net=self.drop_net[0])
            loss = self.module.loss(self.module.collate(dataset, numbers).to(self.device))
            total, nll, tokens = (
                total + loss.total.cpu(),
                nll + loss.nll.cpu(),
                tokens + loss.tokens,
            )
        return Loss(total, nll, tokens)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the trained weights, their averages and the optimiser's moments, by name."""
        tensors = {f"average.{name}": tensor for name, tensor in (self.average or {}).items()}
        for name, parameter in self.parameters.items():
            tensors[f"weight.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state_tensors`` gave.

        Raises:
            KeyError: Naming a tensor that is missing; nothing may be trained then.
        """
        copy_tensors({n: tensors[f"weight.{n}"] for n in self.parameters}, self.parameters)
        if self.average is not None:
            copy_tensors({n: tensors[f"average.{n}"] for n in self.average}, self.average)
        for name, parameter in self.parameters.items():
            keys = ("step", "exp_avg", "exp_avg_sq")
            state = {key: tensors.get(f"optimizer.{key}.{name}") for key in keys}
            if all(value is not None for value in state.values()):
                self.optimizer.state[parameter] = {
                    key: value.clone().to(self.device)
                    for key, value in state.items()
                    if value is not None
                }


@dataclass
class TrainState:
    """Where a training stands.

    Attributes:
        step: Updates done, the skipped ones included.
        seconds: Time spent in updates; validation and saving excluded.
        best: Best value of the selection metric so far; higher is better.
        best_step: Its step.
        stale: Validations since then.
        skipped: Updates left out in all.
    """

    step: int = 0
    place: Place = Place()
    seconds: float = 0.0
    best: float = -math.inf
    best_step: int = 0
    stale: int = 0
    skipped: int = 0


def is_finished(state: TrainState, config: LoopConfig) -> bool:
    """Say whether any of the limits of [train] is reached."""
    return (
        (config.max_steps is not None and state.step >= config.max_steps)
        or (config.max_epochs is not None and state.place.epoch >= config.max_epochs)
        or (config.max_minutes is not None and state.seconds >= 60 * config.max_minutes)
        or (config.patience is not None and state.stale >= config.patience)
    )


def train(
    trainer: Trainer,
    dataset: Dataset,
    state: TrainState,
    *,
    log: Callable[[TrainState, Update, float], None],
    checkpoint: Callable[[TrainState], None],
    steps: Steps = steps,
) -> None:
    """Train until a limit of [train] is reached.

    Args:
        state: Where to start; changed in place.
        log: Called after every update with the seconds it took.
        checkpoint: Called every ``validate_every`` steps and at the end; validates, saves, and
            keeps ``best``, ``best_step`` and ``stale`` of the state.
        steps: Says which examples an update is made of.

    Raises:
        UserError: If too many updates in a row were not finite.
    """
    config = trainer.config
    updates = steps(
        dataset,
        batch_tokens=config.batch_tokens,
        accumulate=config.accumulate,
        seed=config.seed,
        start=state.place,
    )
    skipped_in_a_row, saved = 0, state.step
    while not is_finished(state, config):
        begin = time.perf_counter()
        step = next(updates)
        update = trainer.update(dataset, step, state.step + 1)
        state.step, state.place = state.step + 1, step.after
        skipped_in_a_row = 0 if update.is_finite else skipped_in_a_row + 1
        state.skipped += not update.is_finite
        seconds = trainer.agreed(time.perf_counter() - begin)
        state.seconds += seconds
        log(state, update, seconds)
        if skipped_in_a_row >= _MAX_SKIPPED:
            examples = ", ".join(str(i) for i in step.examples[0][:8])
            raise UserError(
                f"the loss or gradient of {skipped_in_a_row} updates in a row was not finite; the "
                f"last, step {state.step}, began with training pairs {examples}; the checkpoint of "
                f"step {saved} is good; try a lower optim.lr or a clip_norm"
            )
        if state.step % config.validate_every == 0:
            checkpoint(state)
            saved = state.step
    if saved != state.step:
        checkpoint(state)
