"""The two kernels, as one parameter: whatever takes `kernel` is the conformance suite."""

from __future__ import annotations

import pytest

from erasure import KernelUnavailable, load_isal, load_zfec


@pytest.fixture(scope="session")
def isal():
    """Return ISA-L; skip where it is not installed (it is optional)."""
    try:
        return load_isal()
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def zfec_kernel():
    """Return the portable kernel."""
    return load_zfec()


@pytest.fixture(scope="session", params=["isal", "zfec_kernel"])
def kernel(request):
    """Return each kernel in turn."""
    return request.getfixturevalue(request.param)
