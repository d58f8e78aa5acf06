"""What is asserted in these modules is explained as in tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.e2e.docs.reader", "tests.e2e.docs.scenes")
