"""TLS of the feed, both ends of it: who is let in, who is believed, and files that change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from support.authority import Authority
from support.feeds import POLICY, Recorded, capacity, following, recorded
from thunderagent_epp.feed.tls import FeedTlsError, TlsFiles, channel_credentials
from thunderagent_epp.requests.policy import RequestPolicy
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_operator.feed import FeedServer
from thunderagent_operator.feed_tls import server_credentials


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("feed")


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority("stranger")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What the picker logs."""
    return recorded(monkeypatch, "thunderagent_epp.feed.operator_feed")


@asynccontextmanager
async def leading(tls: TlsFiles | None, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    feed = FeedServer(address, tls=tls)
    await feed.start()
    feed.publish(POLICY, capacity("a"), AdmissionPolicy(), RequestPolicy())
    feed.serve()
    try:
        yield f"127.0.0.1:{feed.port}"
    finally:
        await feed.stop(0)


async def is_fed(target: str, tls: TlsFiles | None) -> bool:
    async with following(target, tls=tls) as follower:
        return (await follower.published.get()).capacity == capacity("a")


async def trouble(log: Recorded, target: str, tls: TlsFiles | None) -> str:
    async with following(target, tls=tls) as follower:
        await log.until("warning", 1)
        assert follower.published.empty()
        assert not follower.feed.connected
    return str(log.of("warning")[0]["code"])


def replace_file(file: Path | None, content: bytes) -> None:
    """As a mounted Secret does it: another file takes the old one's place."""
    assert file is not None
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


def without_ca(files: TlsFiles) -> TlsFiles:
    return replace(files, ca=None)


async def test_the_operator_proves_itself_to_the_picker(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path)
    async with leading(without_ca(files)) as target:
        assert await is_fed(target, TlsFiles(ca=files.ca))


async def test_both_prove_themselves_to_each_other(authority: Authority, tmp_path: Path) -> None:
    async with leading(authority.files(tmp_path / "operator")) as target:
        assert await is_fed(target, authority.files(tmp_path / "picker"))


async def test_an_operator_of_another_ca_is_not_believed(
    authority: Authority, stranger: Authority, tmp_path: Path, log: Recorded
) -> None:
    async with leading(without_ca(stranger.files(tmp_path / "operator"))) as target:
        assert await trouble(log, target, TlsFiles(ca=authority.files(tmp_path / "picker").ca)) == "UNAVAILABLE"


@pytest.mark.parametrize(
    "issue",
    [lambda authority: authority.issue("10.9.9.9"), lambda authority: authority.issue(days=-1)],
    ids=["for another address", "expired"],
)
async def test_a_certificate_that_is_not_good_is_not_believed(
    authority: Authority, tmp_path: Path, log: Recorded, issue: Callable[[Authority], tuple[bytes, bytes]]
) -> None:
    files = authority.files(tmp_path)
    certificate, key = issue(authority)
    replace_file(files.certificate, certificate)
    replace_file(files.key, key)
    async with leading(without_ca(files)) as target:
        assert await trouble(log, target, TlsFiles(ca=files.ca)) == "UNAVAILABLE"


async def test_a_picker_without_a_certificate_is_not_let_in(
    authority: Authority, tmp_path: Path, log: Recorded
) -> None:
    files = authority.files(tmp_path)
    async with leading(files) as target:
        assert await trouble(log, target, TlsFiles(ca=files.ca)) == "UNAVAILABLE"


async def test_a_picker_of_another_ca_is_not_let_in(
    authority: Authority, stranger: Authority, tmp_path: Path, log: Recorded
) -> None:
    async with leading(authority.files(tmp_path / "operator")) as target:
        picker = stranger.files(tmp_path / "picker", trusted=authority)
        assert await trouble(log, target, picker) == "UNAVAILABLE"


async def test_plaintext_and_tls_do_not_meet(authority: Authority, tmp_path: Path, log: Recorded) -> None:
    files = authority.files(tmp_path)
    async with leading(without_ca(files)) as target:
        assert await trouble(log, target, None) == "UNAVAILABLE"
    log.events.clear()
    async with leading(None) as target:
        assert await trouble(log, target, TlsFiles(ca=files.ca)) == "UNAVAILABLE"


async def test_files_renewed_at_the_picker_are_used_from_the_next_connection_on(
    authority: Authority, stranger: Authority, tmp_path: Path, log: Recorded
) -> None:
    async with leading(authority.files(tmp_path / "operator")) as target:
        picker = stranger.files(tmp_path / "picker", trusted=authority)
        async with following(target, tls=picker) as follower:
            await log.until("debug", 2)
            certificate, key = authority.issue()
            # Certificate and key are not replaced at one moment: between the two the pair is none.
            replace_file(picker.certificate, certificate)
            replace_file(picker.key, key)
            assert (await follower.published.get()).capacity == capacity("a")


async def test_files_that_become_bad_at_the_picker_are_reported_and_tried_again(
    authority: Authority, tmp_path: Path, log: Recorded
) -> None:
    files = authority.files(tmp_path)
    assert files.ca is not None
    good = files.ca.read_bytes()
    async with leading(None) as unused:
        pass
    async with following(unused, tls=TlsFiles(ca=files.ca)) as follower:
        await log.until("warning", 1)
        replace_file(files.ca, b"nothing")
        await log.until("warning", 2)
        assert log.of("warning")[1]["problem"] == f"{files.ca}: holds no PEM certificate of a CA"
        replace_file(files.ca, good)
        async with leading(without_ca(files), unused):
            await follower.published.get()


async def test_files_renewed_at_the_operator_are_used_from_the_next_connection_on(
    authority: Authority, stranger: Authority, tmp_path: Path, log: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator_log = recorded(monkeypatch, "thunderagent_operator.feed_tls")
    files = authority.files(tmp_path / "operator")
    picker = authority.files(tmp_path / "picker")
    async with leading(files) as target:
        assert await is_fed(target, picker)
        replace_file(files.certificate, b"nothing")
        assert await is_fed(target, picker)
        certificate, key = stranger.issue()
        replace_file(files.certificate, certificate)
        replace_file(files.key, key)
        assert await is_fed(target, TlsFiles(_write(tmp_path, stranger), picker.certificate, picker.key))
        # Who is let in changes with the CA.
        replace_file(files.ca, stranger.certificate)
        assert await trouble(log, target, TlsFiles(_write(tmp_path, stranger), picker.certificate, picker.key))
        assert await is_fed(target, stranger.files(tmp_path / "picker"))
    assert [event["event"] for event in operator_log.of("info")] == ["TLS files of the feed renewed"] * 2
    assert [event["event"] for event in operator_log.of("error")] == [
        "new TLS files of the feed refused; the last good ones stay"
    ]


def _write(directory: Path, authority: Authority) -> Path:
    file = directory / "other-ca.crt"
    file.write_bytes(authority.certificate)
    return file


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeedTlsError, match="give both --feed-cert and --feed-key"):
        TlsFiles(certificate=tmp_path / "tls.crt")


def test_each_end_says_what_it_needs(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path)
    with pytest.raises(FeedTlsError, match="give --feed-ca"):
        channel_credentials(without_ca(files))
    with pytest.raises(FeedTlsError, match="give --feed-cert and --feed-key"):
        server_credentials(TlsFiles(ca=files.ca))


def test_files_that_cannot_be_used_are_named(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path)
    ca, certificate, key = files.ca, files.certificate, files.key
    assert ca is not None
    assert certificate is not None
    assert key is not None

    def refusal() -> str:
        with pytest.raises(FeedTlsError) as refused:
            server_credentials(files)
        return str(refused.value)

    good = key.read_bytes()
    key.write_bytes(stranger.issue()[1])
    assert refusal() == f"{certificate}, {key}: not a certificate and its key: key values mismatch"
    encrypted = serialization.load_pem_private_key(good, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    key.write_bytes(encrypted)
    assert refusal().startswith(f"{certificate}, {key}: not a certificate and its key: ")
    key.write_bytes(b"no key")
    assert refusal().startswith(f"{certificate}, {key}: not a certificate and its key: ")
    key.write_bytes(good)
    ca.write_bytes(b"no certificate")
    assert refusal() == f"{ca}: holds no PEM certificate of a CA"
    ca.unlink()
    assert refusal() == f"{ca}: cannot be read: No such file or directory"


def test_bad_files_are_told_when_a_feed_is_made(tmp_path: Path) -> None:
    with pytest.raises(FeedTlsError, match="cannot be read: No such file or directory"):
        FeedServer("127.0.0.1:0", tls=TlsFiles(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key"))


async def test_a_feed_is_not_made_with_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FeedTlsError, match="cannot be read: No such file or directory"):
        async with following("127.0.0.1:1", tls=TlsFiles(ca=tmp_path / "ca.crt")):
            pass
