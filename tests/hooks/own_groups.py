"""A model on process groups of its own making, and pipeline communicators of its user's making, inside pool workers.

Megatron's `parallel_state` has other groups, and unless asked for the same layout another one, with nothing parallel.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import megatron_compress
from megatron_compress.config import CompressionConfig
from megatron_compress.training.data import training_microbatch
from megatron_compress.training.loop import _forward_step
from megatron_compress.training.model import transformer_config
from tests.hooks import runs, tracing


class Logging(P2PCommunicator):
    """Does something of its own, and leaves the transfer to Megatron."""

    sent = 0

    def send_forward(self, *args, **kwargs):
        type(self).sent += 1
        return super().send_forward(*args, **kwargs)


class Own(P2PCommunicator):
    """Moves tensors itself."""

    def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, **_):
        handles = [
            dist.isend(tensor, peer, group=self.pp_group)
            for tensor, peer in ((tensor_send_prev, self.prev_rank), (tensor_send_next, self.next_rank))
            if tensor is not None
        ]
        received = [
            torch.empty(tensor_shape, requires_grad=True) if wanted else None for wanted in (recv_prev, recv_next)
        ]
        for tensor, peer in zip(received, (self.prev_rank, self.next_rank), strict=True):
            if tensor is not None:
                dist.irecv(tensor.data, peer, group=self.pp_group).wait()
        for handle in handles:
            handle.wait()
        return *received, None


class Foreign:
    """Not even derived from Megatron's."""

    def __init__(self, pp_group, config):
        self.pp_group, self.config = pp_group, config


def run(
    group: dist.ProcessGroup, compress: dict | None, communicator: str = "P2PCommunicator", usual_size: int = 1
) -> dict:
    """One step at TP=2 x PP=2 on four ranks: losses, weights and their gradients, traffic, what the seams saw.

    Args:
        usual_size: of the tensor- and pipeline-parallel groups that `parallel_state` has. megatron-core 0.16 takes the
            cross-entropy over those, whatever groups the model has.
    """
    with runs._model_parallel(tensor_model_parallel_size=usual_size, pipeline_model_parallel_size=usual_size):
        collection = _collection()
        if compress is not None:
            megatron_compress.install(CompressionConfig(**compress))
        config = transformer_config(runs.experiment(2, 2))
        model = _build(config, collection)
        with tracing.trace_seams() if compress else nullcontext() as seen:
            losses = schedules.forward_backward_pipelining_without_interleaving(
                forward_step_func=_forward_step,
                data_iterator=iter(microbatches()),
                model=model,
                num_microbatches=runs.MICROBATCHES,
                seq_length=runs.SEQUENCE,
                micro_batch_size=runs.MICRO_BATCH,
                p2p_communicator=globals()[communicator](pp_group=collection.pp, config=config),
                pg_collection=collection,
            )
        return {
            "losses": [loss.item() for loss in losses],
            "weights": {name: parameter.detach().numpy() for name, parameter in model.named_parameters()},
            "gradients": {name: parameter.grad.numpy() for name, parameter in model.named_parameters()},
            "stage": collection.pp.rank(),
            "pipeline": dist.get_process_group_ranks(collection.pp),
            "rows": None if compress is None else megatron_compress.report().rows(),
            "seen": seen,
            "sent": Logging.sent,
        }


def refused(group: dist.ProcessGroup, compress: dict, communicator: str) -> str:
    """The error that a run ends with."""
    try:
        run(group, compress, communicator)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def context_group(group: dist.ProcessGroup, compress: dict) -> tuple[list[float], list[dict]]:
    """A gather and its backward over the context-parallel group of two ranks; the gradient, and the traffic."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    with runs._model_parallel(tensor_model_parallel_size=2, context_parallel_size=2):
        megatron_compress.install(CompressionConfig(**compress))
        mine = torch.full((2, 4), 0.1 + group.rank(), requires_grad=True)
        gathered = gather_from_sequence_parallel_region(mine, group=parallel_state.get_context_parallel_group())
        (gathered * 0.1).sum().backward()
        return [*gathered[:, 0].tolist(), *mine.grad[:, 0].tolist()], megatron_compress.report().rows()


def _collection() -> ProcessGroupCollection:
    alone, all_ranks = [[0], [1], [2], [3]], [[0, 1, 2, 3]]
    pairs = {"tp": [[0, 1], [2, 3]], "pp": [[0, 2], [1, 3]], "embd": [[0, 2], [1, 3]], "mp": all_ranks}
    pairs |= dict.fromkeys(("pos_embd", "cp", "dp", "dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp"), alone)
    pairs |= {"tp_cp": pairs["tp"], "tp_dp_cp": pairs["tp"]}
    collection = ProcessGroupCollection()
    for name, ranks in pairs.items():
        setattr(collection, name, dist.new_subgroups_by_enumeration(ranks)[0])
    return collection


def _build(config, collection: ProcessGroupCollection) -> GPTModel:
    torch.manual_seed(1 + collection.pp.rank())
    model_parallel_cuda_manual_seed(1, tp_rank=collection.tp.rank(), ep_rank=0, etp_rank=0)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=256,
        max_sequence_length=runs.SEQUENCE,
        pre_process=collection.pp.rank() == 0,
        post_process=collection.pp.rank() == collection.pp.size() - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=collection,
    )


def microbatches() -> list[torch.Tensor]:
    sizes = (runs.MICRO_BATCH, runs.SEQUENCE)
    return [training_microbatch(runs.corpus(), 1, 1, index, *sizes) for index in range(runs.MICROBATCHES)]
