"""A web server as a store: cuts, lies, and what is said of them."""

import asyncio
import os

import pytest

from adapter.core.artifacts import FetchProgress
from adapter.errors import StoreUnavailable
from tests.store.conftest import archive, files_of
from tests.store.web import (
    Page,
    cut_after,
    silence,
    status,
    well,
    whole_instead_of_a_part,
)

_MODEL = {"model.bin": os.urandom(5 * 2**20)}
_ARCHIVE = archive(_MODEL)


@pytest.fixture
async def cache(website, open_cache):
    website.pages["/models/a.tar.gz"] = Page(_ARCHIVE)
    cache = await open_cache(f"{website.url}/models/")
    website.asked.clear()
    return cache


@pytest.fixture
async def hasty(website, open_cache):
    """Gives up after a second."""
    website.pages["/models/a.tar.gz"] = Page(_ARCHIVE)
    return await open_cache(f"{website.url}/models/", timeout_seconds=1)


def gets(website):
    """Range and If-Match of each GET."""
    return [(start, match) for method, _, start, match in website.asked if method == "GET"]


async def test_a_cut_download_goes_on_where_it_was(website, cache):
    website.script = [cut_after(3 * 2**20)]
    artifact, _ = await cache.fetch("a.tar.gz")
    assert files_of(artifact) == _MODEL
    (_, first), (start, _) = gets(website)
    assert first == '"1"'
    assert int(start.removeprefix("bytes=").partition("-")[0]) >= 2 * 2**20


async def test_download_obstore_gave_up_goes_on(website, cache):
    """With If-Match."""
    # that a part is refused ends obstore's own attempts
    website.script = [cut_after(3 * 2**20), whole_instead_of_a_part, well]
    progress = FetchProgress()
    artifact, _ = await cache.fetch("a.tar.gz", progress)
    assert files_of(artifact) == _MODEL
    assert progress.done_bytes == progress.total_bytes == len(_ARCHIVE)
    start, match = gets(website)[2]
    assert start.endswith("-")  # obstore's own would name the end
    assert int(start[len("bytes=") : -1]) >= 2 * 2**20
    assert match == '"1"'


async def test_a_changed_etag_in_mid_download_starts_over(website, cache):
    other = {"model.bin": os.urandom(5 * 2**20)}

    async def change_and_cut(answer):
        response = await cut_after(3 * 2**20)(answer)
        website.pages["/models/a.tar.gz"] = Page(archive(other), '"2"')
        return response

    website.script = [change_and_cut]
    artifact, _ = await cache.fetch("a.tar.gz")
    assert (files_of(artifact), artifact.etag) == (other, '"2"')


async def test_ever_changing_object_is_given_up(website, cache):
    async def change_and_cut(answer):
        response = await cut_after(3 * 2**20)(answer)
        website.pages["/models/a.tar.gz"] = Page(_ARCHIVE, f'"{len(website.asked)}"')
        return response

    website.script = [change_and_cut, *([change_and_cut] * 30)]
    with pytest.raises(StoreUnavailable, match="changed 5 times"):
        await cache.fetch("a.tar.gz")
    assert cache.cache.used_bytes == 0


async def test_without_an_etag_a_cut_download_begins_anew(website, cache):
    website.pages["/models/a.tar.gz"] = Page(_ARCHIVE, None)
    website.script = [cut_after(3 * 2**20)]
    progress = FetchProgress()
    artifact, _ = await cache.fetch("a.tar.gz", progress)
    assert files_of(artifact) == _MODEL
    assert gets(website) == [(None, None), (None, None)]
    assert progress.done_bytes == len(_ARCHIVE)


async def test_server_without_ranges_that_cuts_is_error(website, hasty):
    async def cut_the_whole(answer):
        answer.offset = 0
        return await cut_after(3 * 2**20)(answer)

    website.script = [cut_the_whole] * 30
    with pytest.raises(StoreUnavailable, match=r"key: a\.tar\.gz\)"):
        await hasty.fetch("a.tar.gz")
    assert hasty.cache.used_bytes == 0


async def test_unexpected_length_is_not_taken(website, cache):
    page = website.pages["/models/a.tar.gz"]

    async def shorter(answer):
        answer.page = Page(page.body[:-10], page.etag)
        return await well(answer)

    website.script = [shorter] * 30
    with pytest.raises(StoreUnavailable, match=f"says it has {len(_ARCHIVE)} bytes"):
        await cache.fetch("a.tar.gz")


async def test_silent_store_is_given_up_in_time(website, hasty):
    website.script = [silence] * 30
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        await hasty.fetch("a.tar.gz")


async def test_a_busy_store_is_asked_again(website, cache):
    website.script = [status(503), status(500), status(429)]
    artifact, _ = await cache.fetch("a.tar.gz")
    assert files_of(artifact) == _MODEL


async def test_stores_answer_is_quoted_by_status_alone(website, hasty):
    website.script = [status(500, "secret: token")] * 30
    with pytest.raises(StoreUnavailable, match="500 Internal Server Error") as failed:
        await hasty.fetch("a.tar.gz")
    assert "secret" not in str(failed.value)
    place = f"(URL: {website.url}/models, key: a.tar.gz)"
    assert str(failed.value).startswith(f"Failed to download model data {place}: ")


async def test_only_so_many_artifacts_are_fetched_at_once(website, open_cache):
    at_once = most = 0
    everyone = asyncio.Event()

    async def counted(answer):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 2:
            everyone.set()
        await everyone.wait()
        response = await well(answer)
        at_once -= 1
        return response

    for number in range(6):
        website.pages[f"/{number}.tar.gz"] = Page(archive({"x": bytes([number])}))
    website.script = [counted] * 6
    cache = await open_cache(website.url, concurrency=2)
    await asyncio.gather(*(cache.fetch(f"{number}.tar.gz") for number in range(6)))
    assert most == 2
