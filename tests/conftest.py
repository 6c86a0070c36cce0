import os

# bf16 matrix products die with SIGILL on some CPUs that claim AMX but may not use it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from browser import chromium  # noqa: F401, a fixture
from fixtures import analysed, root, runs, shared_root  # noqa: F401, fixtures
from hypothesis import settings

settings.register_profile("sparsam", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("sparsam")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
