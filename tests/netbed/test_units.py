"""What stands on the command line."""

import pytest

from megatron_compress.netbed import units


def test_rates_and_delays_are_read_as_tc_reads_them():
    assert [units.rate(text) for text in ("500kbit", "20mbit", "2.5Gbit")] == [5e5, 2e7, 2.5e9]
    assert [units.delay(text) for text in ("50us", "10ms", "0.5s")] == pytest.approx([5e-5, 1e-2, 0.5])


@pytest.mark.parametrize("text", ["100", "100mbps", "0mbit", "-1mbit", "fast", ""])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="kbit, mbit, gbit, as in 10mbit"):
        units.rate(text)
