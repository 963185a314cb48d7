from metabridge import Sinusoid, fit, method
from metabridge.models import mlp
from metabridge.training import load


def test_a_run_in_low_precision_is_loaded_on_a_cpu_in_full(tmp_path):
    fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=1, precision="bfloat16", out=tmp_path, progress=False)
    assert load(tmp_path).dtype is None
