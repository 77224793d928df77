"""The retry policy for control calls that never reached Triton, bounded in number and time."""

from collections.abc import Callable

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from adapter.errors import BackendUnavailable


def never_arrived(error: BaseException) -> bool:
    """Return whether the call never reached Triton; one that did may be what killed it."""
    return isinstance(error, BackendUnavailable) and not error.delivered


def control_retries(
    on_retry: Callable[[], None],
    *,
    attempts: int = 6,
    seconds: float = 6.0,
    wait_seconds: float = 0.2,
) -> AsyncRetrying:
    """Return a policy that outlasts a restart of Triton, which takes about a second.

    Loading a loaded model and unloading an absent one are no-ops in Triton, so each control call
    may be repeated. `on_retry` is called before each further attempt.
    """

    def count(_: RetryCallState) -> None:
        on_retry()

    return AsyncRetrying(
        retry=retry_if_exception(never_arrived),
        stop=stop_after_attempt(attempts) | stop_after_delay(seconds),
        wait=wait_random_exponential(multiplier=wait_seconds, max=2.0),
        before_sleep=count,
        reraise=True,
    )
