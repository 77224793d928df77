"""The phrases of the allocators: which words in a failure text of Triton's mean out of memory.

All in lower case. STRONG_RULES stand on their own, WEAK_RULES need an observation that agrees. The
first rule that matches names the failure, so the narrow ones come first.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Finds a phrase: a head is searched for, and the rest is matched around it."""

    name: str
    heads: tuple[str, ...]
    tail: re.Pattern[str]  # matched where the head ends
    before: re.Pattern[str]  # searched for in front of the head
    plain: bool  # words that people write, too
    of_shm: bool  # the reading that has to agree is one of /dev/shm


def _rule(
    name: str,
    heads: str,
    tail: str = "",
    before: str = "",
    *,
    plain: bool = False,
    of_shm: bool = False,
) -> Rule:
    words = tuple(heads.split("|"))
    return Rule(name, words, re.compile(tail), re.compile(before), plain, of_shm)


# ahead of `out of memory` where it is the error itself and not a word in a sentence
_AS_AN_ERROR = (
    r"(?:^|[:()\[\]<>;,.!=|\n'-]|\b(?:errors?|failed|failure|failing|ran|runs?|running|is|are|was"
    r"|went|goes|got|hit|with|to|because|\w*allocator|pool|process|worker|server|\d))\s{0,3}"
    r"(?:(?:cuda|hip|xpu|mps|backend|gpu|device|host|system|ram|vram) ){0,2}$"
)
_NO_TOPIC = r"(?! (?:bounds?|range|access|region|address|errors|issues?|problems?)\b| ?\?)"
_SHM = r"shared memory|/dev/shm|\bshm\b|posix_fallocate"
_CUDA_LIBRARIES = "cublas_status|cudnn_status|cusolver_status|cusparse_status|curand_status"
_SIZE = r"\(?\d[\d.,]{0,24} ?(?:bytes|b|[kmgt]i?b?)\b"

# fmt: off
STRONG_RULES = (
    _rule("cuda_out_of_memory", "cuda out of memory", _NO_TOPIC, _AS_AN_ERROR, plain=True),
    _rule("cuda_out_of_memory", "cudaerrormemoryallocation|cuda_error_out_of_memory"),
    _rule("cuda_library_alloc_failed", f"{_CUDA_LIBRARIES}|cufft|cnmem_status|nvjpeg_status",
        r"_(?:internal_error_(?:device|host)_)?(?:alloc\w{0,20}_fail\w{0,40}|out_of_memory)"),
    _rule("cuda_malloc_failed", "cumemalloc|cumemcreate|cudamalloc|cudahostalloc",
        r"(?:async|host)?(?:\([^\n()]{0,80}\))? failed(?=[.;\n]|$)"),
    # its figures follow, and may be cut off
    _rule("onnxruntime_arena", "bfcarena::allocaterawinternal"),
    _rule("onnxruntime_arena", "available memory of", r" \d+ is smaller than requested bytes \w+"),
    _rule("onnxruntime_arena", "failed to allocate memory", r" for requested buffer of size \d+"),
    _rule("tensorflow_oom", "oom when allocating", r" (?:tensor|[\d.])"),
    _rule("tensor_not_initialized", "dst tensor|src tensor", " is not initialized"),
    _rule("resource_exhausted", "resource_exhausted|resource exhausted|resourceexhaustederror",
        r"[^\n]{0,120}?(?:out of memory|\boom\b"
        r"|(?:failed|attempting|trying) to (?:allocate|reserve))"),
    _rule("tensorrt_out_of_memory", "outofmemory", r"(?= error in| \(|\)|[.;:]|\s*$)"),
    _rule("tensorrt_out_of_memory", "requested amount of gpu memory|requested amount of memory",
        r" \(\d{1,24} bytes\) could not be allocated"),
    _rule("out_of_memory_error", "outofmemoryerror|outofmemoryexception", plain=True),
    _rule("rmm_out_of_memory", "out_of_memory", r": (?:rmm failure|cuda error)"),
    _rule("bad_alloc", "bad_alloc|bad allocation"),
    _rule("kv_cache",
        "no available memory for the cache blocks|larger than the available kv cache memory|"
        "larger than the maximum number of tokens that can be stored in kv cache"),
    _rule("kv_cache", "maxtokensinpagedkvcache", r" \(\d{1,24}\) must be large enough"),
    _rule("vllm_free_memory", "free memory on device", r"[^\n]{0,80}? is less than desired"),
    _rule("triton_memory_limit", "memory limit set for", r" \w+ \d+ has (?:been )?exceeded"),
    _rule("openvino_allocation", "exceeded max size of memory", " (?:object )?allocation"),
    _rule("device_allocation", "cl_mem_object_allocation_failure|hiperroroutofmemory"),
    _rule("shared_memory", "out of shared memory"),
    _rule("shared_memory", "no space left on device", r"(?=[^\n]{0,20}/dev/shm)"),
    _rule("shared_memory", "no space left on device|cannot allocate memory", "", _SHM),
    _rule("no_memory_errno", "[errno 12]|enomem"),
    _rule("python_memory_error", "memoryerror|_arraymemoryerror", r"(?= ?[:(<\n]|$)", plain=True),
    _rule("allocation_failed",
        "failed to allocate|unable to allocate|cannot allocate|can't allocate|can not allocate|"
        "could not allocate|couldn't allocate",
        rf" (?:{_SIZE}|request for {_SIZE}|(?:[\w-]{{1,20}} ){{0,4}}?memory(?! in static tls)"
        r"|a? ?contiguous buffer|(?:an )?output buffer|kv[ -]cache|compute buffers|pinned stage"
        r"|(?:cuda|gpu|device)\d{0,2} buffer)"),
    _rule("allocation_failed", "memory allocation|device allocation|cuda allocation",
        " (?:failed|failure|error)"),
    _rule("not_enough_memory", "not enough|insufficient",
        r" (?:(?:free|available|gpu|cuda|device|host|system|cpu|shared) ){0,3}"
        "memory(?! on requested size)"),
    _rule("killed_for_memory", "running low on memory|oomkilled|oom-killed"),
    _rule("out_of_memory", "out of memory", _NO_TOPIC, _AS_AN_ERROR, plain=True),
)

WEAK_RULES = (
    _rule("stub_not_healthy", "stub process", r" \S{0,20} ?is not healthy"),
    _rule("stub_exited", "stub process exited unexpectedly"),
    _rule("tensorrt_enqueue", "unable to enqueue for inference"),
    _rule("tensorrt_context", "unable to create tensorrt context|unable to create tensorrt engine",
        r":?\s*(?=;|$)"),
    _rule("cuda_library_status", f"{_CUDA_LIBRARIES}|cufft",
        r"_(?:not_initialized|execution_failed|internal_error)(?:_\w{1,40})?"),
    # JAX, where there is no room for its context
    _rule("jax_no_device", "no supported devices found for platform cuda"),
    _rule("opencl_resources", "cl_out_of_resources"),
    _rule("engine_core_died", "engine core initialization failed|enginedeaderror"),
    _rule("worker_killed", "exit code|exitcode", "[:=]? ?(?:137|-9)"),
    # a disk, or /dev/shm
    _rule("shared_memory_may_be_full", "[errno 28] no space left on device", of_shm=True),
    _rule("shared_memory_may_be_full", "unable to initialize shared memory key", of_shm=True),
    _rule("worker_killed", "sigkill|killed by signal 9|signal: 9|signal: killed"),
)
# fmt: on
