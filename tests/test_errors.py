from __future__ import annotations

import math

import numpy as np
import pytest

from metabridge.errors import InputError, check_not_negative, check_positive


@pytest.mark.parametrize("check", [check_positive, check_not_negative])
@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, math.nan, -1, "1", None])
def test_values_that_are_not_finite_numbers_of_the_right_sign_are_refused(check, value):
    with pytest.raises(InputError, match=r"lr is .*, but must be a"):
        check("lr", value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), 10**300])
def test_positive_numbers_of_any_type_are_accepted(value):
    check_positive("lr", value)
    check_not_negative("lr", value)
