"""Megatron settings that compression cannot honour are refused with reason and fix."""

from types import SimpleNamespace

import pytest
import torch

from megatron_compress import cpu
from megatron_compress.config import CompressionConfig

cpu.apply()

from megatron_compress.hooks import refusals  # noqa: E402  (imports megatron-core, which needs the shims)
from megatron_compress.hooks.refusals import UnsupportedSettingError  # noqa: E402

COMPRESSION = CompressionConfig(pipeline={"forward": {"compressor": "fp8", "exempt_stages": [0, 1]}})
FINE = {
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "batch_p2p_comm": True,
    "overlap_p2p_comm": False,
}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": False}


def refuse_unsupported(config):
    refusals.refuse_unsupported(config, COMPRESSION)


def test_an_ordinary_configuration_passes():
    refuse_unsupported(SimpleNamespace(**FINE))
    refuse_unsupported(SimpleNamespace(**FINE, use_ring_exchange_p2p=False, cuda_graph_impl="none"))
    refuse_unsupported(SimpleNamespace(**FINE | INTERLEAVED))
    refuse_unsupported(SimpleNamespace(**FINE, variable_seq_lengths=True))
    overlapped = INTERLEAVED | {"overlap_p2p_comm": True, "variable_seq_lengths": True}
    refuse_unsupported(SimpleNamespace(**FINE | overlapped))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"use_ring_exchange_p2p": True}, "use_ring_exchange_p2p"),
        ({"tp_comm_overlap": True}, "tp_comm_overlap"),
        ({"symmetric_ar_type": "two_shot"}, "symmetric_ar_type"),
        ({"enable_cuda_graph": True}, "CUDA-graph"),
        ({"cuda_graph_impl": "local"}, "CUDA-graph"),
        ({"virtual_pipeline_model_parallel_size": 2}, "batch_p2p_comm=False"),
        (INTERLEAVED | {"variable_seq_lengths": True}, "overlap_p2p_comm=True"),
    ],
)
def test_each_unsupported_setting_is_named(setting, named):
    with pytest.raises(UnsupportedSettingError, match=named):
        refuse_unsupported(SimpleNamespace(**FINE | setting))


def test_stages_that_the_model_lacks_are_named():
    with pytest.raises(UnsupportedSettingError, match=r"pipeline forward: exempt_stages has 1, but .* 0 to 0"):
        refuse_unsupported(SimpleNamespace(**FINE | {"pipeline_model_parallel_size": 1}))


def test_layers_that_communicate_by_themselves_are_named():
    engine = type("Linear", (torch.nn.Identity,), {"__module__": "transformer_engine.pytorch.module.linear"})
    layer = type("TERowParallelLinear", (engine,), {"__module__": "megatron.core.extensions.transformer_engine"})()
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    tensor = CompressionConfig(tensor={"forward": {"compressor": "fp8"}})
    refusals.refuse_layers([model], tensor)  # one rank: nothing to send
    layer.tp_size = 2
    with pytest.raises(UnsupportedSettingError, match=r"TERowParallelLinear.*local layer spec"):
        refusals.refuse_layers([model], tensor)
    refusals.refuse_layers([model], COMPRESSION)
