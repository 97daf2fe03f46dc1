"""AQ-SGD: both ends remember the same, errors shrink with the changes between epochs, and nothing survives in files."""

import itertools

import pytest
import torch

from megatron_compress import registry
from megatron_compress.config import CompressionConfig
from megatron_compress.sample_memory import SampleMemory
from megatron_compress.strict_yaml import ConfigError
from megatron_compress.wire import TensorSpec
from tests.strategies import normal

SHAPE = (8, 2, 64)  # two samples of eight tokens
SAMPLES = [(0, 5), (3, 1)]


class Link:
    """A sender and a receiver with memories of their own."""

    def __init__(self, compressor, folder=None, dtype=torch.float32):
        files = [None, None] if folder is None else [folder / "sender", folder / "receiver"]
        self.compressor, self.dtype = compressor, dtype
        self.ends = [SampleMemory(6, file) for file in files]

    def send(self, x: torch.Tensor, samples=SAMPLES[0]) -> torch.Tensor:
        spec = TensorSpec.of(x, 1)
        sender, receiver = (self.compressor.of_samples(end, samples, end.has(samples)) for end in self.ends)
        payload = sender.compress(x, spec)
        assert payload.nbytes == receiver.payload_bytes(spec)
        return receiver.decompress(payload, spec, torch.empty_like(x))

    def same(self) -> bool:
        sender, receiver = (end.state_dict() for end in self.ends)
        equal = torch.equal(sender["values"].nan_to_num(7.0), receiver["values"].nan_to_num(7.0))
        return equal and sender["samples"] == receiver["samples"]


def drifting(epoch: int, samples=SAMPLES[0], shape=SHAPE, dtype=torch.float32) -> torch.Tensor:
    """Activations that settle: each epoch they change half as much as in the one before."""
    return (normal(shape, samples[0]) + 0.5**epoch * normal(shape, 100 + epoch)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"bits": 8}, {"bits": 2, "group_size": 64}])
def test_both_ends_remember_the_same_after_many_steps(settings, dtype):
    link = Link(registry.create("aq_sgd", **settings), dtype=dtype)
    for epoch in range(100):
        for samples in SAMPLES:
            x = (10 * normal(SHAPE, epoch) * 30.0 ** (epoch % 3)).to(dtype)
            arrived = link.send(x, samples)
            assert arrived.isfinite().all()
            assert link.same()
            assert torch.equal(link.ends[1].read(samples, x.device), arrived.float())


def test_the_first_epoch_is_exact():
    link = Link(registry.create("aq_sgd"))
    x = drifting(0)
    assert torch.equal(link.send(x), x)


@pytest.mark.parametrize("bits", [4, 8])
def test_errors_shrink_with_the_changes(bits):
    """What the paper's convergence rests on: the error is relative to the change, so it vanishes where that does."""
    link, direct = Link(registry.create("aq_sgd", bits=bits)), registry.create("fixed_point", bits=bits)
    errors = []
    for epoch in range(12):
        x = drifting(epoch)
        errors.append(float((link.send(x) - x).square().mean().sqrt()))
    spec = TensorSpec.of(x, 1)
    plain = direct.decompress(direct.compress(x, spec), spec, torch.empty_like(x))
    assert errors[0] == 0
    for before, after in itertools.pairwise(errors[1:]):
        assert after < 0.75 * before
    assert errors[-1] < 0.01 * float((plain - x).square().mean().sqrt())


def test_errors_do_not_add_up_where_nothing_changes():
    link, x = Link(registry.create("aq_sgd", bits=2)), normal(SHAPE, 1)
    link.send(2 * x)
    errors = [float((link.send(x) - x).abs().max()) for _ in range(20)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]


def test_a_bad_value_is_seen_and_forgotten():
    link, x = Link(registry.create("aq_sgd")), normal(SHAPE, 1)
    link.send(x)
    bad = x.clone()
    bad[3, 1, 7] = torch.inf
    arrived = link.send(bad)
    assert arrived[:, :, 7].isnan().all() and arrived[:, :, :7].isfinite().all()
    assert link.same()
    assert link.send(x).isfinite().all() and link.same()


def test_a_mapped_file_holds_the_same_and_leaves_nothing(tmp_path):
    compressor = registry.create("aq_sgd")
    links = [Link(compressor), Link(compressor, tmp_path / "new folder")]
    for epoch in range(3):
        in_memory, mapped = (link.send(drifting(epoch)) for link in links)
        assert torch.equal(in_memory, mapped)
    assert links[1].same() and links[1].ends[0].nbytes == links[0].ends[0].nbytes == 2 * 8 * 64 * 4
    assert not list((tmp_path / "new folder").iterdir())


def test_a_restored_memory_goes_on_to_the_bit():
    link, compressor = Link(registry.create("aq_sgd")), registry.create("aq_sgd")
    for epoch in range(3):
        link.send(drifting(epoch))
    restored = Link(compressor)
    for end, state in zip(restored.ends, [end.state_dict() for end in link.ends], strict=True):
        end.load_state_dict(state)
    assert torch.equal(link.send(drifting(3)), restored.send(drifting(3)))


def test_samples_keep_their_shape():
    link = Link(registry.create("aq_sgd"))
    link.send(normal(SHAPE, 1))
    with pytest.raises(ValueError, match="samples must keep their length"):
        link.send(normal((9, 2, 64), 1), (2, 4))
    with pytest.raises(ValueError, match=r"expected \[s, samples, h\]"):
        link.send(normal((8, 3, 64), 1), (2, 4))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tensor: {forward: {compressor: aq_sgd}}", "a reduction has no samples to remember"),
        ("pipeline: {backward: {compressor: aq_sgd}}", "remembers activations, not gradients"),
    ],
)
def test_where_it_does_not_belong_it_is_refused(tmp_path, text, reason):
    file = tmp_path / "compress.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        CompressionConfig.load(file)
