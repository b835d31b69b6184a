"""The kinds of GPUs that files of schedulers and clouds ask for: labels of nodes, and types of instances with the
GPU that each has, and how many.

Azure, docs "sizes/gpu-accelerated"; AWS, "Amazon EC2 instance types"; Google Cloud, "GPU machine types". Parts of a
GPU (Azure's NV6ads_A10_v5, AWS's g6f) are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

from phalanx.frameworks.values import tables_of

_ONE_TO_EIGHT = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
"""GPUs of AWS's sizes with several."""
_TYPES: tuple[tuple[str, str, Mapping[str, int] | int], ...] = (
    (r"standard_nc(24|48|96)ads_a100_v4", "a100-pcie", {"24": 1, "48": 2, "96": 4}),
    (r"standard_nd96asr(?:_a100)?_v4", "a100-40gb", 8),
    (r"standard_nd96amsr?_a100_v4", "a100", 8),
    (r"standard_(nc40ads|nc80adis|ncc40ads)_h100_v5", "h100-nvl", {"nc40ads": 1, "nc80adis": 2, "ncc40ads": 1}),
    (r"standard_nd96isr?_h100_v5", "h100", 8),
    (r"standard_nd96isr?_h200_v5", "h200", 8),
    (r"standard_nd96isr_mi300x_v5", "mi300x", 8),
    (r"standard_nc(4|8|16|64)as_t4_v3", "t4", {"4": 1, "8": 1, "16": 1, "64": 4}),
    (r"standard_nv(36|72)adm?s_a10_v5", "a10", {"36": 1, "72": 2}),
    (r"standard_nc(6|12|24)s_v3", "v100-16gb", {"6": 1, "12": 2, "24": 4}),
    (r"p3\.(2|8|16)xlarge", "v100-16gb", {"2": 1, "8": 4, "16": 8}),
    (r"p3dn\.24xlarge", "v100", 8),
    (r"p4d\.24xlarge", "a100-40gb", 8),
    (r"p4de\.24xlarge", "a100", 8),
    (r"p5\.(4|48)xlarge", "h100", {"4": 1, "48": 8}),
    (r"p5en?\.48xlarge", "h200", 8),
    (r"p6-b200\.48xlarge", "b200", 8),
    (r"p6-b300\.48xlarge", "b300", 8),
    (r"g4dn\.(12xlarge|metal|(?:2|4|8|16)?xlarge)", "t4", {"12xlarge": 4, "metal": 8}),
    (r"g5\.(\d*xlarge)", "a10g", _ONE_TO_EIGHT),
    (r"gr?6\.(\d*xlarge)", "l4", _ONE_TO_EIGHT),
    (r"g6e\.(\d*xlarge)", "l40s", _ONE_TO_EIGHT),
    (r"a2-highgpu-(1|2|4|8)g", "a100-40gb", {}),
    (r"a2-ultragpu-(1|2|4|8)g", "a100", {}),
    (r"a3-(?:high|mega|edge)gpu-(1|2|4|8)g", "h100", {}),
    (r"a3-ultragpu-8g", "h200", 8),
    (r"a4-highgpu-8g", "b200", 8),
    (r"g2-standard-(4|8|12|16|24|32|48|96)", "l4", {"24": 2, "48": 4, "96": 8}),
)
"""Pattern of a type, its GPU, and how many it has, of all or by the part that the pattern finds. Google's `gpu` types
say their number; other parts that a table does not have are types of one GPU."""


def instance(name: str) -> tuple[str, int] | None:
    """Return (GPU, how many) of a type of instance; None for an unknown one."""
    for pattern, gpu, counts in _TYPES:
        if match := re.fullmatch(pattern, name.strip().lower()):
            if isinstance(counts, int):
                return gpu, counts
            size = match[1]
            return gpu, counts.get(size, int(size) if "gpu" in pattern else 1)
    return None


_GPU_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator")
"""Labels of a node with the name of its GPU: of NVIDIA's GPU feature discovery, and of Google's Kubernetes."""
_INSTANCE = "node.kubernetes.io/instance-type"
_ACCELERATOR_NAMES = {"nvidia-tesla-a100": "a100-40gb", "nvidia-h100-mega-80gb": "h100"}
"""Names of accelerators that are not the name of their GPU (cloud.google.com/compute/docs/gpus)."""


def gpu_of_pod(pod: Mapping[str, Any]) -> str:
    """Return the GPU of the nodes that a pod's selector or its required affinity asks for; empty: any, or several."""
    affinity = pod.get("affinity")
    affinity = affinity.get("nodeAffinity") if isinstance(affinity, Mapping) else None
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") if isinstance(affinity, Mapping) else {}
    terms = [*tables_of(required, "nodeSelectorTerms"), *tables_of(pod, "nodeSelectorTerms")]
    asked = [
        e for term in terms for e in tables_of(term, "matchExpressions") if e.get("key") in (*_GPU_LABELS, _INSTANCE)
    ]
    chosen = [
        v[0] for e in asked if e.get("operator") == "In" and isinstance(v := e.get("values"), list) and len(v) == 1
    ]
    if isinstance(selector := pod.get("nodeSelector"), Mapping):
        chosen += [selector[label] for label in (*_GPU_LABELS, _INSTANCE) if label in selector]
    if not chosen:
        return ""
    rented = instance(str(chosen[0]))
    return rented[0] if rented else _ACCELERATOR_NAMES.get(str(chosen[0]), str(chosen[0]))
