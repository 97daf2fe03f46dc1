"""The control: a payload is the tensor's own bytes."""

import torch

from megatron_compress import registry
from megatron_compress.wire import FLOAT_DTYPES, TensorSpec
from tests.strategies import finite_bits


def test_payload_is_the_tensor_and_decodes_to_its_bits():
    identity = registry.create("identity")
    for dtype in FLOAT_DTYPES:
        spec = TensorSpec((3, 7, 9), dtype)
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        x = finite_bits(spec, 0)
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]).to(dtype)
        payload = identity.compress(x, spec)
        assert torch.equal(payload[: spec.nbytes], x.view(-1).view(torch.uint8))
        decoded = identity.decompress(payload, spec, torch.empty_like(x))
        assert torch.equal(decoded.view(integer), x.view(integer))
