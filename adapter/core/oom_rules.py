"""The phrases that mean out of memory, framework by framework, in lower case.

A rule's head is a plain string, found fast; its tail is matched where the head ends. Tails are
bounded, so that a rule costs the same wherever its head stands.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """`before`: what must stand near, ahead of the head. `plain`: words that people write too."""

    name: str
    heads: tuple[str, ...]
    tail: re.Pattern[str]
    before: re.Pattern[str] | None
    plain: bool


def _rule(name: str, *heads: str, tail: str = "", before: str = "", plain: bool = False) -> Rule:
    near = re.compile(before) if before else None
    return Rule(name, heads, re.compile(tail, re.DOTALL), near, plain)


# ahead of `out of memory` where it is the error itself and not a word in a sentence
_AS_AN_ERROR = (
    r"(?:^|[:()\[\]<>;,.!=|\n'-]|\b(?:errors?|failed|failure|failing|ran|runs?|running|is|are|was"
    r"|went|goes|got|hit|with|to|because|gpu|cuda|hip|xpu|mps|backend|device|host|system|ram|vram"
    r"|allocator|pool|process|worker|server|resource_exhausted|\d))\s*$"
)
_SHM = r"shared memory|/dev/shm|\bshm\b|--shm-size|shm_open|posix_fallocate"
_SIZE = r"\(?\d[\d.,]{0,24} ?(?:bytes|b|[kmgt]i?b?)\b"

STRONG_RULES = (
    _rule(
        "cuda_out_of_memory",
        *("cuda out of memory", "cuda error: out of memory", "cuda runtime (out of memory"),
        tail=r"(?! (?:errors|issues?|problems?)\b| ?\?)",
        before=_AS_AN_ERROR,
        plain=True,
    ),
    _rule("cuda_out_of_memory", "cudaerrormemoryallocation", "cuda_error_out_of_memory"),
    _rule(
        "hip_out_of_memory",
        *("hip out of memory", "hip error: out of memory", "hiperroroutofmemory"),
        *("hiperrormemoryallocation", "hip_error_out_of_memory"),
        tail=r"(?! (?:errors|issues?|problems?)\b| ?\?)",
        before=_AS_AN_ERROR,
        plain=True,
    ),
    _rule(
        "cuda_library_alloc_failed",
        *("cublas_status_alloc_failed", "cudnn_status_alloc_failed", "cusolver_status_alloc_failed"),
        *("cusparse_status_alloc_failed", "cufft_alloc_failed", "curand_status_allocation_failed"),
        *("nvjpeg_status_allocator_failure", "cutensor_status_alloc_failed"),
        tail=r"(?:_\w{1,40})?",
    ),
    _rule("cnmem_out_of_memory", "cnmem_status_out_of_memory"),
    _rule(
        "cuda_malloc_failed",
        *("cumemalloc", "cumemcreate", "cumemalloc_v2", "cudamalloc", "cudamallocasync"),
        *("cudahostalloc", "cudamallochost", "cudamallocmanaged", "cuda allocation"),
        tail=r"(?:\([^\n()]{0,80}\))? failed(?=[.;\n]|$)",
    ),
    _rule(
        "onnxruntime_arena",
        "available memory of",
        tail=r" \d{1,24} is smaller than requested bytes of \d{1,24}",
    ),
    _rule(
        "onnxruntime_arena",
        *("failed to allocate memory", "failed to allocated memory"),
        tail=r" for requested buffer of size \d{1,24}",
    ),
    _rule("tensorflow_oom", "oom when allocating", tail=r" (?:tensor|[\d.])"),
    _rule("tensor_not_initialized", "dst tensor", "src tensor", tail=r" is not initialized"),
    _rule(
        "resource_exhausted",
        *("resource_exhausted", "resource exhausted", "resourceexhaustederror"),
        tail=r"[^\n]{0,120}?(?:out of memory|\boom\b|(?:failed|attempting|trying) to allocate"
        r"|failed to allocate request|attempting to reserve)",
    ),
    _rule(
        "xla_allocation",
        *("attempting to allocate", "attempting to reserve"),
        tail=r" [\d.]{1,24}[kmgt]?i?b?\b[^\n]{0,60}\. that was not possible",
    ),
    _rule("tensorrt_out_of_memory", "outofmemory", tail=r"(?= error in| \(|\)|[.;:]|\s*$)"),
    _rule(
        "tensorrt_out_of_memory",
        "requested amount of",
        tail=r" (?:gpu )?memory \(\d{1,24} bytes\) could not be allocated",
    ),
    _rule(
        "out_of_memory_error",
        *("outofmemoryerror", "outofmemoryexception", "cudaoutofmemoryerror"),
        plain=True,
    ),
    _rule("rmm_out_of_memory", "out_of_memory: rmm failure", "out_of_memory: cuda error"),
    _rule("rmm_out_of_memory", "rmm failure", tail=r"[^\n]{0,200}?(?:pool size|limit) exceeded"),
    _rule("rmm_out_of_memory", "rmm failure", tail=r"[^\n]{0,200}?exceeded memory limit"),
    _rule("bad_alloc", "bad_alloc", "bad allocation"),
    _rule(
        "kv_cache",
        *("no available memory for the cache blocks", "no available memory for kv cache"),
        *("larger than the available kv cache memory", "maxtokensinpagedkvcache"),
        *("larger than the maximum number of tokens that can be stored in kv cache",),
        *("not enough kv cache", "no space for kv cache"),
        tail=r"(?: \(\d{1,24}\) must be large enough)?",
    ),
    _rule("vllm_free_memory", "free memory on", tail=r" device[^\n]{0,80}? is less than desired"),
    _rule("triton_memory_limit", "memory limit set for", tail=r" \w+ \d+ has (?:been )?exceeded"),
    _rule("openvino_allocation", "exceeded max size of memory", tail=r" (?:object )?allocation"),
    _rule("opencl_allocation", "cl_mem_object_allocation_failure", "cl_out_of_host_memory"),
    _rule("vulkan_allocation", "error_out_of_device_memory", "vk_error_out_of_device_memory"),
    _rule("shared_memory", "out of shared memory"),
    _rule("shared_memory", "no space left on device", tail=r"(?=[^\n]{0,20}/dev/shm)"),
    _rule("shared_memory", "no space left on device", before=_SHM),
    _rule("shared_memory", "cannot allocate memory", before=_SHM),
    _rule("no_memory_errno", "[errno 12]", "enomem"),
    _rule("no_memory_errno", "posix_memalign(", tail=r"[^\n]{0,60}== 0\. 12 vs 0"),
    _rule(
        "python_memory_error",
        *("memoryerror", "_arraymemoryerror"),
        tail=r"(?=\s*(?:[:(<]|$)|\s*\n)",
        plain=True,
    ),
    _rule(
        "allocation_failed",
        *("failed to allocate", "failed to alloc", "unable to allocate", "cannot allocate"),
        *("can't allocate", "could not allocate", "couldn't allocate", "can not allocate"),
        tail=rf" (?:{_SIZE}|request for {_SIZE}|(?:[\w-]{{1,20}} ){{0,4}}?memory(?! in static tls)"
        r"|a? ?contiguous buffer|kv[ -]cache|compute buffers|pinned stage|pinned buffer"
        r"|(?:cuda|gpu|device|rocm|vulkan)[\w:]{0,3} buffer)",
    ),
    _rule(
        "allocation_failed",
        *("memory allocation", "device allocation", "cuda allocation", "gpu allocation"),
        *("hbm allocation", "cpu memory allocation", "host allocation"),
        tail=r" (?:failed|failure|error)",
    ),
    _rule(
        "not_enough_memory",
        *("not enough", "insufficient"),
        tail=r" (?:(?:free|available|gpu|cuda|device|host|system|cpu|video|shared|ram|total) ){0,3}"
        r"memory(?! on requested size)",
    ),
    _rule("ran_low_on_memory", "running low on memory"),
    _rule("killed_for_memory", "oomkilled", "oom-killed", "oom killed", plain=True),
    _rule(
        "out_of_memory",
        "out of memory",
        tail=r"(?! (?:bounds?|range|access|region|address|errors|issues?|problems?)\b| ?\?)",
        before=_AS_AN_ERROR,
        plain=True,
    ),
)

WEAK_RULES = (
    _rule("stub_not_healthy", "stub process", tail=r" \S{0,20} ?is not healthy"),
    _rule("stub_exited", "stub process exited unexpectedly"),
    _rule("tensorrt_enqueue", "unable to enqueue for inference", "failed to enqueue"),
    _rule(
        "tensorrt_context",
        *("unable to create tensorrt context", "unable to create tensorrt engine"),
        tail=r":?\s*(?=;|$)",
    ),
    _rule(
        "cuda_library_status",
        *("cublas_status_not_initialized", "cudnn_status_not_initialized"),
        *("cusolver_status_not_initialized", "cusparse_status_not_initialized"),
        *("cudnn_status_execution_failed", "cudnn_status_internal_error", "cl_out_of_resources"),
        *("cublas_status_execution_failed", "cublas_status_internal_error"),
        *("cudnn_status_mapping_error", "cudnn_status_sublibrary_loading_failed"),
        tail=r"(?:_\w{1,40})?",
    ),
    _rule(
        "engine_core_died",
        *("engine core initialization failed", "enginedeaderror"),
        *("enginecore encountered an issue", "engine core proc"),
    ),
    _rule(
        "worker_killed",
        *("exit code 137", "exit code: 137", "exitcode 137", "exitcode: 137", "exitcode=137"),
        *("exit code -9", "exit code: -9", "exitcode -9", "exitcode: -9", "exitcode=-9"),
        *("killed by signal 9", "killed by signal: 9", "killed by signal: killed", "signal 9"),
        *("sigkill",),
    ),
)
