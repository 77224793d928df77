"""Judges failures by their texts and by what was known of memory. Figures are MiB."""

import pytest

from adapter.core.evidence import (
    Evidence,
    FailedInferences,
    Outcome,
    Place,
    Scene,
    is_refuted,
    judge_inference,
    judge_load,
    name_place,
    was_memory_low,
)
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.oom import Classifier, Phase, Strength, Verdict

MIB = 2**20
ONE = Device("GPU-1")
TWO = Device("GPU-2")

OUT_OF_MEMORY = (Outcome.OUT_OF_MEMORY, Evidence.TEXT)
CUDA = "CUDA out of memory. Tried to allocate {} MiB."
BARE_CUDA = "CUDA error: out of memory"
WEAK = "Stub process 'm_0_0' is not healthy."
SHM = "Unable to initialize shared memory key '/triton_python_backend_shm_region_1'"


def reading(*, shm_free=None, kills=None, **used):
    """Return a reading; `used` is MiB by the name of a device, whose size nobody asks for."""
    named = {"one": ONE, "two": TWO, "host": HOST}
    devices = {named[name]: DeviceReading(10**15, count * MIB) for name, count in used.items()}
    free = None if shm_free is None else shm_free * MIB
    return MemoryReading(devices, shm_free_bytes=free, oom_kills=kills)


def scene(*readings, limits=(("one", 1000),), devices=(ONE,)):
    named = {"one": ONE, "two": TWO, "host": HOST}
    sizes = {named[name]: limit * MIB for name, limit in limits}
    used = readings[-1].used if readings else {}
    free = {device: max(0, sizes[device] - used[device]) for device in sizes if device in used}
    return Scene(sizes, readings, devices, free)


def strong(text):
    """Return the verdict of the reader of texts, which must call this one strong."""
    verdict = Classifier().judge(text, phase=Phase.INFER, http_status=500)
    assert verdict.strength is Strength.STRONG
    return verdict


def weak(text):
    verdict = Classifier().judge(text, phase=Phase.INFER, http_status=500)
    assert verdict.strength is Strength.WEAK
    return verdict


def judged(text, failures, around, *, is_only_model=False):
    """Judge an inference with this strong text."""
    judgement = judge_inference(
        strong(text), text, around, failures=failures, is_only_model=is_only_model
    )
    return judgement.outcome, judgement.evidence


def test_strong_text_of_a_load_is_believed():
    for around in (scene(), scene(reading(one=0)), scene(reading(host=10), limits=[("host", 90)])):
        judgement = judge_load(strong(CUDA.format(5000)), CUDA.format(5000), around)
        assert (judgement.outcome, judgement.evidence) == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("readings", "is_low"),
    [
        ([], False),
        ([reading(one=950)], False),  # 5 % are free
        ([reading(one=951)], True),
        ([reading(one=951), reading(one=100)], True),  # meanwhile
        ([reading(two=999)], False),  # the model is not there
        ([reading(one=0, kills=3), reading(one=0, kills=3)], False),
        ([reading(one=0, kills=3), reading(one=0, kills=4)], True),
        ([reading(one=0, shm_free=1)], False),
        ([reading(one=0, shm_free=0)], True),
    ],
)
def test_weak_text_counts_if_memory_was_low(readings, is_low):
    around = scene(*readings, limits=[("one", 1000), ("two", 1000)])
    expected = Outcome.OUT_OF_MEMORY if is_low else Outcome.FAILED
    assert judge_load(weak(WEAK), WEAK, around).outcome is expected
    for failures in (0, 9):
        judgement = judge_inference(weak(WEAK), WEAK, around, failures=failures, is_only_model=True)
        assert judgement.outcome is expected
    assert was_memory_low(around, [ONE]) is is_low


def test_weak_text_without_a_device_counts_anywhere():
    around = scene(reading(two=999), limits=[("one", 1000), ("two", 1000)], devices=())
    assert judge_load(weak(WEAK), WEAK, around).outcome is Outcome.OUT_OF_MEMORY


def test_weak_text_of_shm_counts_if_full():
    assert weak(SHM).of_shm
    assert judge_load(weak(SHM), SHM, scene(reading(one=999))).outcome is Outcome.FAILED
    full = scene(reading(one=0, shm_free=0))
    assert judge_load(weak(SHM), SHM, full).outcome is Outcome.OUT_OF_MEMORY


def test_text_without_words_of_memory_fails():
    text = "invalid shape"
    nothing = Verdict(Strength.NONE, None, None, None)
    around = scene(reading(one=999, kills=1, shm_free=0))
    assert judge_load(nothing, text, around).evidence is Evidence.NO_WORDS
    judgement = judge_inference(nothing, text, around, failures=0, is_only_model=True)
    assert judgement.outcome is Outcome.FAILED


def test_inference_asking_too_much_is_not_believed():
    around = scene(reading(one=830))
    refuted = (Outcome.FAILED, Evidence.MORE_THAN_DEVICE)
    assert judged(CUDA.format(1001), 0, around) == refuted
    assert judged(CUDA.format(1001), 5, around, is_only_model=True) == refuted
    assert judged(CUDA.format(1000), 0, around) == OUT_OF_MEMORY


def test_fourth_failure_alone_is_for_good():
    around = scene(reading(one=830))
    assert judged(BARE_CUDA, 2, around, is_only_model=True) == OUT_OF_MEMORY
    expected = (Outcome.TOO_LARGE, Evidence.ALONE)
    assert judged(BARE_CUDA, 3, around, is_only_model=True) == expected
    assert judged(CUDA.format(17), 3, around, is_only_model=True) == expected
    assert judged(BARE_CUDA, 3, around) == OUT_OF_MEMORY


def test_inference_on_an_unseen_device_is_believed_once():
    around = scene(reading(host=10), limits=[("host", 90)], devices=[HOST])
    text = CUDA.format(5000)  # the limit of host memory says nothing about it
    assert judged(text, 0, around) == OUT_OF_MEMORY
    assert judged(text, 1, around) == (Outcome.FAILED, Evidence.UNSEEN_AGAIN)
    assert judged(BARE_CUDA, 1, scene(limits=())) == (Outcome.FAILED, Evidence.UNSEEN_AGAIN)
    assert judge_load(strong(text), text, around).figures.limit_bytes is None


def test_text_is_compared_with_device_that_it_names():
    limits = [("one", 1000), ("two", 4000), ("host", 9000)]
    around = scene(reading(one=900, two=0, host=0), limits=limits, devices=[ONE, HOST])
    assert judged(CUDA.format(2000), 1, around) == (Outcome.FAILED, Evidence.MORE_THAN_DEVICE)
    assert judged(CUDA.format(11), 1, around) == OUT_OF_MEMORY  # 100 are free on its GPU
    text = "std::bad_alloc: failed to allocate 800 MiB"
    assert judged(text, 1, around) == (Outcome.FAILED, Evidence.FAR_MORE_FREE)
    elsewhere = scene(reading(one=900, two=0, host=0), limits=limits, devices=[HOST])
    assert judged(CUDA.format(2000), 0, elsewhere) == OUT_OF_MEMORY  # the larger GPU has that
    assert judged(CUDA.format(10), 1, elsewhere) == (Outcome.FAILED, Evidence.FAR_MORE_FREE)


def test_text_is_doubted_if_all_devices_refute():
    limits = [("one", 1000), ("two", 2000)]
    around = scene(reading(one=900, two=0), limits=limits, devices=[ONE, TWO])
    assert judged(CUDA.format(10), 1, around) == (Outcome.FAILED, Evidence.FAR_MORE_FREE)
    assert judged(CUDA.format(11), 1, around) == OUT_OF_MEMORY  # 100 are free on the first GPU
    assert judged(CUDA.format(2000), 0, around) == OUT_OF_MEMORY
    assert judged(CUDA.format(2001), 0, around) == (Outcome.FAILED, Evidence.MORE_THAN_DEVICE)


def test_load_is_refuted_by_what_was_free():
    """A text without a figure is believed: most are true, and 507 would promise too much."""
    around = scene(reading(one=400), reading(one=100), reading(one=300))  # 600 were free throughout

    def refuted(text, around=around):
        verdict = Classifier().judge(text, phase=Phase.LOAD, http_status=400)
        assert verdict.strength is Strength.STRONG
        return is_refuted(verdict, text, around)

    assert refuted(CUDA.format(60))
    assert not refuted(CUDA.format(61))
    assert not refuted(BARE_CUDA)
    assert not refuted(CUDA.format(60), scene())  # nothing is read


def test_text_without_device_is_compared_with_model():
    text = "failed to allocate memory for requested buffer of size 104857600"  # 100 MiB
    limits = [("one", 1000), ("host", 9000)]
    around = scene(reading(one=100, host=0), limits=limits, devices=[ONE])
    assert judged(text, 1, around) == OUT_OF_MEMORY  # 900 are free
    around = scene(reading(one=0, host=0), limits=limits, devices=[ONE])
    assert judged(text, 1, around) == (Outcome.FAILED, Evidence.FAR_MORE_FREE)
    nowhere = scene(reading(one=0, host=0), limits=limits, devices=())
    assert judged(text, 1, nowhere) == (Outcome.FAILED, Evidence.UNSEEN_AGAIN)


def test_text_about_shm_is_compared_with_shm():
    text = "No space left on device in /dev/shm: failed to allocate 6 MiB"
    full = scene(reading(one=0, shm_free=50))
    assert judged(text, 1, full) == OUT_OF_MEMORY
    roomy = scene(reading(one=0, shm_free=60))
    assert judged(text, 1, roomy) == (Outcome.FAILED, Evidence.FAR_MORE_FREE)
    unseen = scene(reading(one=0))
    assert judged(text, 0, unseen) == OUT_OF_MEMORY
    assert judged(text, 1, unseen) == (Outcome.FAILED, Evidence.UNSEEN_AGAIN)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (CUDA.format(1), Place.GPU),
        ("CUBLAS_STATUS_ALLOC_FAILED", Place.GPU),
        ("std::bad_alloc: out_of_memory: CUDA error", Place.GPU),
        ("std::bad_alloc", Place.HOST),
        ("MemoryError", Place.HOST),
        ("[Errno 12] Cannot allocate memory", Place.HOST),
        ("out of shared memory", Place.SHM),
        ("out of memory", None),
    ],
)
def test_place_is_read_from_the_text(text, place):
    assert name_place(text) is place


def test_figures_are_of_the_fullest_device():
    around = scene(
        reading(one=900, two=990), limits=[("one", 1000), ("two", 1000)], devices=[ONE, TWO]
    )
    figures = judge_load(strong(CUDA.format(300)), CUDA.format(300), around).figures
    assert figures.needed_bytes == 300 * MIB
    assert figures.free_bytes == 10 * MIB
    assert (figures.limit_bytes, figures.device) == (1000 * MIB, TWO)
    above = scene(reading(one=1010))
    assert judge_load(strong(BARE_CUDA), BARE_CUDA, above).figures.free_bytes == 0


def test_failures_in_a_row_are_counted_by_package():
    failed = FailedInferences()
    assert [failed.add(key, 1.0, 0.0) for key in "aab"] == [0, 1, 0]
    assert [failed.add("a", 3.0, answered_at=2.0), failed.add("b", 3.0, 0.5)] == [0, 1]
    assert failed.add("a", 4.0, answered_at=2.0) == 1
