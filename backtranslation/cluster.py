"""The shards of a generation on the machines of a Ray cluster, or in several local processes.

Ray Data hands the shards to workers, each of which loads the model once. What they write lies in
the folder of the generation, which all machines must see under one path.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backtranslation.generate import Generation
from backtranslation.shards import Manifest, ShardFolder
from bertfused.errors import UserError

if TYPE_CHECKING:
    import numpy as np


class ShardWorker:
    """Translates the shards it is given."""

    def __init__(self, generation: Generation, folder: ShardFolder) -> None:
        self._generation, self._folder = generation, folder
        self._engine = generation.open_engine()

    def __call__(self, batch: "dict[str, np.ndarray]") -> dict[str, list[int]]:
        """Translate shards; says how many lines of each it did."""
        lines = [
            sum(self._folder.write(int(number), self._generation.corpus, self._engine.translate))
            for number in batch["shard"]
        ]
        return {"lines": lines}


def generate_on_ray(
    generation: Generation,
    folder: ShardFolder,
    workers: int,
    *,
    address: str | None = None,
    progress: Callable[[int], object] = lambda lines: None,
) -> Manifest | None:
    """Translate all shards that are not complete.

    Args:
        workers: How many shards are in work at once, each on one processor.
        address: Of a running cluster; ``None`` starts one on this machine.
        progress: Called with the lines that are done since the last call, shard by shard.

    Returns:
        The manifest of the whole corpus.

    Raises:
        UserError: If Ray is not installed, or as of `generate`.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError("--ray needs Ray: pip install 'bert-fused-nmt[ray]'") from error
    pending = [number for number in folder.numbers(None) if not folder.is_complete(number)]
    progress(sum(map(folder.done, folder.numbers(None))))
    if pending:
        options: dict[str, Any] = {} if address else {"num_cpus": workers}
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False, **options)
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            items = [{"shard": number} for number in pending]
            done = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
                ShardWorker,
                fn_constructor_args=(generation, folder),
                compute=ray.data.ActorPoolStrategy(size=min(workers, len(pending))),
                batch_size=1,
                num_cpus=1,
            )
            for row in done.iter_rows():
                progress(row["lines"])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from error
            raise
        finally:
            ray.shutdown()
    return folder.join()
