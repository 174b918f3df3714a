"""Encoders by setting: a package, a folder, and services over HTTP that come and go."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tokenizers
from grpc import StatusCode
from grpc.aio import AioRpcError

from interlock import Failure, Interlock
from interlock.api import search as module
from interlock.api.search import SearchAnswer
from interlock.search import packaged
from interlock.search.index import Index, IndexedTool
from interlock.search.onnx import OnnxEncoder
from interlock.search.table import shipped
from interlock.search.vectors import checked
from interlock.search.wordpiece import WordPiece
from tests.support.answers import typed_refusal
from tests.support.calls import admit
from tests.support.office import OFFERED
from tests.support.upstream_servers import Answer as HttpAnswer
from tests.support.upstream_servers import Got, HttpServer, json_answer
from tests.support.wires import wired

PACKAGE = Path(__file__).parents[2] / "packages" / "search-encoder"
FOLDER = PACKAGE / "src" / "interlock_search_encoder"


def _embed(got: Got) -> HttpAnswer:
    """Both protocols, with the vectors of the table: longer than one, in an order of its own, as services may."""
    asked = orjson.loads(got.body)
    vectors = (7 * shipped().documents(asked["input"])).tolist()
    if got.path == "/api/embed":
        return json_answer({"model": asked["model"], "embeddings": vectors})
    assert got.path == "/v1/embeddings"
    rows = [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(vectors)]
    return json_answer({"object": "list", "data": rows[::-1]})


@asynccontextmanager
async def _office(home: Path, encoder: str, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, search_encoder=encoder, **settings) as app:
        await admit(app, *OFFERED)
        yield app


def _first(found: SearchAnswer) -> str:
    return found[0].version.row.address


@pytest.mark.proves("REG-14")
@pytest.mark.parametrize("kind", ["ollama", "openai"])
async def test_a_service_finds_by_meaning_and_words_go_on_without_it(home: Path, kind: str):
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(HttpServer.open())
        server.otherwise = _embed
        async with _office(home, f"{kind}:tiny:1@{server.url}") as app:
            found = await app.search("bill the client")
            assert (_first(found), found.by, found.note) == ("office.create_invoice", "both", None)
            found = await app.search("send message to user", by="meaning")
            assert (_first(found), found.by) == ("office.send_email", "meaning")
            assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
            assert {orjson.loads(got.body)["model"] for got in server.got} == {"tiny:1"}
            async with wired(app) as wires:
                await stack.aclose()
                found = await app.search("translate a text")
                assert (_first(found), found.by) == ("office.translate", "words")
                assert found.note == "the encoder cannot be reached"
                assert (await app.search("translate a text", by="words")).note is None
                assert _first(await app.search("office.forecast")) == "office.forecast"
                with pytest.raises(Failure, match="cannot be reached") as refused:
                    await app.search("translate a text", by="meaning")
                assert refused.value.code == "E3106"
                query = {"q": "translate a text", "by": "meaning"}
                rest = await wires.http.get("/v1/tools", params=query)
                assert (rest.status_code, rest.json()["error"]["error_code"]) == (500, "E3106")
                rest = await wires.http.get("/v1/tools", params={**query, "by": "both"})
                assert (rest.json()["by"], rest.json()["note"]) == ("words", "the encoder cannot be reached")
                rpc = await wires.rpc("tools.search", {"query": query["q"], "by": "meaning"})
                assert rpc["error"]["data"]["error_code"] == "E3106"
                rpc = await wires.rpc("tools.search", {"query": query["q"]})
                assert (rpc["result"]["by"], rpc["result"]["note"]) == ("words", "the encoder cannot be reached")
                grpc = await wires.discovered("translate a text", by="words")
                assert grpc[0].tool_id == "office.translate"
                with pytest.raises(AioRpcError) as over_grpc:
                    await wires.discovered("translate a text", by="meaning")
                assert typed_refusal(over_grpc.value).failure["error_code"] == "E3106"
                assert over_grpc.value.code() is StatusCode.UNAVAILABLE


@pytest.mark.proves("REG-14")
async def test_a_service_that_comes_back_is_used_again_and_vectors_survive_a_restart(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    async with HttpServer.open() as server:
        server.otherwise = lambda _: HttpAnswer(status=503)
        async with _office(home, f"ollama:tiny@{server.url}", search_encoder_secret="key") as app:
            await app.secrets.set("key", "a-bearer", by="test")
            assert (await app.search("bill the client")).note == "the encoder answered with status 503"
            server.otherwise = _embed
            found = await app.search("bill the client")
            assert (_first(found), found.by, found.note) == ("office.create_invoice", "both", None)
            assert {got.headers["authorization"] for got in server.got} == {"Bearer a-bearer"}
        server.got.clear()
        async with Interlock.open(home, search_encoder=f"ollama:tiny@{server.url}", search_encoder_secret="key") as app:
            assert _first(await app.search("bill the client")) == "office.create_invoice"
        assert [orjson.loads(got.body)["input"] for got in server.got] == [["bill the client"]]
    # Each row of the file says which model made its vector, and how many numbers that has.
    with closing(sqlite3.connect(home / "search" / "vectors.db")) as stored:
        rows = stored.execute("SELECT model, dimension, length(vector) FROM tool_vector").fetchall()
    width = shipped().documents(["x"]).shape[1]
    assert set(rows) == {(f"ollama:tiny@{server.url}", width, 2 * width)}
    assert len(rows) >= len(OFFERED)


async def test_vectors_of_another_length_than_those_of_requests_are_made_anew(home: Path):
    """After a restart: a service has another model under the name that it had."""
    whole = shipped().documents(["x"]).shape[1]

    def shorter(got: Got) -> HttpAnswer:
        asked = orjson.loads(got.body)
        return json_answer({"embeddings": shipped().documents(asked["input"])[:, : whole // 2].tolist()})

    async with HttpServer.open() as server:
        for answer in (_embed, shorter, _embed):
            server.otherwise = answer
            async with Interlock.open(home, search_encoder=f"ollama:tiny@{server.url}") as app:
                await admit(app, *OFFERED)
                for by in ("both", "meaning"):
                    found = await app.search("bill the client", by=by)
                    assert (_first(found), found.by, found.note) == ("office.create_invoice", by, None)


@pytest.mark.proves("REG-14")
async def test_a_search_by_meaning_ranks_by_cosine_similarity(home: Path):
    async with _office(home, "table") as app:
        found = await app.search("send message to user", by="meaning", limit=5)
        assert _first(found) == "office.send_email"
        index = app.tools.index
        ids = list(await index.surface(app.caller))
        vectors = await index.vectors(ids)
        assert vectors is not None
        similar = dict(zip(ids, (vectors @ shipped().queries(["send message to user"])[0]).tolist(), strict=True))
        names = [one.version.row.address for one in found]
        order = sorted(similar, key=lambda one: -similar[one])
        assert [one.partition("@")[0] for one in order][: len(names)] == names
        assert [one.score for one in found] == [pytest.approx(similar[one], abs=1e-3) for one in order[: len(names)]]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HttpAnswer(body=b"{"), "it is not JSON"),
        (HttpAnswer(body=b"[]"), "it does not have the form"),
        (json_answer({"embeddings": []}), "there should be 1 vectors"),
        (json_answer({"embeddings": [["a", "b"]]}), "not lists of numbers"),
        (json_answer({"embeddings": [[1e300, 1e300]]}), "not finite"),
        (json_answer({"embeddings": [[1.0] * 9000]}), "up to 8192 numbers"),
        (HttpAnswer(body=b" " * 2_000_000), "answers with more than vectors"),
    ],
)
async def test_vectors_that_cannot_be_used_are_refused(home: Path, answer: HttpAnswer, reason: str):
    async with HttpServer.open() as server:
        server.otherwise = lambda _: answer
        async with _office(home, f"ollama:tiny@{server.url}") as app:
            found = await app.search("translate")
            assert (found.by, _first(found)) == ("words", "office.translate")
            assert reason in (found.note or "")


async def test_words_alone_and_encoders_that_are_not_there(home: Path, tmp_path: Path):
    (tmp_path / "model.onnx").write_bytes(b"no model")
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n")
    for encoder, reason in (
        ("none", "the setting search_encoder is none"),
        ("package", "interlock-search-encoder is not installed"),
        ("./nothing-here", "the encoder cannot be loaded (FileNotFoundError)"),
        (str(tmp_path), "the encoder cannot be loaded"),
    ):
        async with _office(home, encoder) as app:
            found = await app.search("translate a text")
            assert (_first(found), found.by) == ("office.translate", "words")
            assert (found.note or "").startswith(reason)
            with pytest.raises(Failure) as refused:
                await app.search("translate a text", by="meaning")
            assert refused.value.code == "E3106"


@pytest.mark.parametrize(
    "setting",
    [
        "tables",
        "ollama:tiny",
        "openai:@https://x",
        "openai:m@ftp://x",
        "openai:m@https://me:pass@host",
        "ollama:m@http://h?k",
    ],
)
async def test_a_setting_that_names_no_encoder_is_refused(home: Path, setting: str):
    with pytest.raises(Failure) as refused:
        async with Interlock.open(home, search_encoder=setting):
            pass
    assert refused.value.code == "E3108"


async def test_a_credential_does_not_travel_in_clear_text(home: Path):
    with pytest.raises(Failure, match="clear text"):
        async with Interlock.open(home, search_encoder="openai:m@http://10.1.2.3", search_encoder_secret="key"):
            pass


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder into which the package was installed."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PACKAGE, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    return tmp_path / "site"


async def test_the_package_is_built_found_and_used(home: Path, site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert packaged.installed() == site / "interlock_search_encoder"
    async with _office(home, "auto") as app:
        found = await app.search("bill the client", by="meaning")
        assert (_first(found), found.by) == ("office.create_invoice", "meaning")
        assert await app.search("qwertz asdfgh") == []


def _described(folder: Path, **stated: Any) -> OnnxEncoder:
    """The model of the package in a folder with a `tokenizer.json`, as others publish theirs."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes((FOLDER / "model.onnx").read_bytes())
    pieces = {piece: number for number, piece in enumerate((FOLDER / "vocab.txt").read_text().splitlines())}
    untyped: Any = tokenizers
    made: Any = untyped.Tokenizer(untyped.models.WordPiece(pieces, unk_token="[UNK]"))
    made.normalizer = untyped.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = untyped.pre_tokenizers.BertPreTokenizer()
    made.post_processor = untyped.processors.BertProcessing(("[SEP]", pieces["[SEP]"]), ("[CLS]", pieces["[CLS]"]))
    made.enable_padding(length=512)  # as many of them say; it is for batches
    made.save(str(folder / "tokenizer.json"))
    if stated:
        (folder / "encoder.json").write_bytes(orjson.dumps(stated))
    return OnnxEncoder(folder)


async def test_a_folder_with_a_tokenizer_of_any_kind_is_an_encoder(home: Path, tmp_path: Path):
    texts = [text for text, _ in PIECES if "[UNK]" not in _cut(text)] + ["x", "word " * 300]
    own, described = OnnxEncoder(FOLDER), _described(tmp_path / "plain")
    assert np.allclose(described.documents(texts), own.documents(texts), atol=1e-5)
    assert described.queries(["\ud800 lone"]).shape == own.queries(["lone"]).shape
    # What the model wants in front of a text, and which piece stands for it.
    led = _described(tmp_path / "led", query="query: ", document="passage: ", share=0.3, near=0.2)
    assert np.allclose(led.queries(["send a mail"]), own.queries(["query: send a mail"]), atol=1e-5)
    assert np.allclose(led.documents(["send a mail"]), own.queries(["passage: send a mail"]), atol=1e-5)
    assert (led.share, led.near) == (0.3, 0.2)
    first = _described(tmp_path / "first", pooling="first")
    # Vectors of one are not taken for those of another.
    assert len({own.model, described.model, led.model, first.model}) == 4
    with pytest.raises(ValueError, match="pooling"):
        _described(tmp_path / "other", pooling="last")
    async with _office(home, str(tmp_path / "plain")) as app:
        found = await app.search("bill the client", by="meaning")
        assert (_first(found), found.by, found.note) == ("office.create_invoice", "meaning", None)


async def test_without_the_package_that_reads_a_tokenizer_words_alone_count(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _described(tmp_path / "plain")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    async with _office(home, str(tmp_path / "plain")) as app:
        found = await app.search("translate a text")
        assert (_first(found), found.by) == ("office.translate", "words")
        assert found.note == "tokenizers is not installed, which the encoder needs"


def test_a_model_other_than_the_stated_one_is_not_loaded(tmp_path: Path):
    for name in ("vocab.txt", "encoder.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "model.onnx").write_bytes(b"other")
    with pytest.raises(ValueError, match="not the one"):
        OnnxEncoder(tmp_path)


def test_tools_whose_vectors_come_later_are_found_by_words_until_then():
    table = shipped()
    index = Index(counts=table)
    entries = [
        IndexedTool("mail", "send_email", description="Send an email message to a recipient"),
        IndexedTool("sum", "add", description="Add"),
    ]
    index.add(entries)
    seen = index.mask(["mail", "sum"])
    asked = table.queries(["notify somebody in writing"])
    assert index.without_vector(index.mask(["mail", "sum", "gone"])) == ["mail", "sum"]
    assert index.search("notify somebody in writing", 9, seen, asked=asked) == []
    index.place(["mail", "gone"], table.documents([entries[0].text(), "x"]))
    assert index.without_vector(index.mask(["mail", "sum"])) == ["sum"]
    assert [hit.id for hit in index.search("notify somebody in writing", 9, seen, asked=asked)] == ["mail"]
    assert index.search("add", 1, seen, asked=table.queries(["add"]))[0].id == "sum"
    assert index.search("add", 9, seen, by="meaning", asked=table.queries(["add"])) == []


@pytest.mark.parametrize("bad", [[[1, 2], [3]], [[float("nan"), 1]], [[float("inf"), 1]], 7, [[]], [], [[None]]])
def test_vectors_are_checked(bad: Any):
    with pytest.raises(ValueError, match="vectors"):
        checked(bad, 1)
    assert np.allclose(checked([[3.0, 4.0]], 1), [[0.6, 0.8]])
    with pytest.raises(ValueError, match="had 3 before"):
        checked([[3.0, 4.0]], 1, 3)


# What the tokenizer of the original model makes of these texts.
PIECES = [
    ("getHTTPStatus_v2 (returns JSON)", "get ##ht ##tp ##sta ##tus _ v ##2 ( returns j ##son )"),
    ("8♥, 10♥ at 0°C", "8 ##♥ , 10 ##♥ at 0 ##° ##c"),
    ("≤1y periods", "≤ ##1 ##y periods"),
    ("chai: चाय कैसे", "cha ##i : च ##ा ##य क ##स"),
    ("Crème brûlée, naïve İstanbul", "cr ##eme br ##ule ##e , naive istanbul"),
    ("天气预报 for Tokyo 東京", "天 [UNK] [UNK] [UNK] for tokyo 東 京"),
    ("안녕 こんにちは", "ᄋ ##ᅡ ##ᆫ ##ᄂ ##ᅧ ##ᆼ こ ##ん ##に ##ち ##は"),
    ("tab\tnew\nline\x00\x07zero\u200bwidth", "tab new line ##zer ##ow ##id ##th"),
    ("line\x07zero", "line ##zer ##o"),
    ("x" * 101 + " ok", "[UNK] ok"),
    ("ﬁne ａｂｃ", "ﬁ ##ne [UNK]"),
    ("don't—stop…", "don ' t — stop …"),
    ("🚀 launch", "[UNK] launch"),
]


def _cut(text: str) -> str:
    names = (FOLDER / "vocab.txt").read_text().splitlines()
    return " ".join(names[one] for one in WordPiece(names).ids(text, 126))


def test_text_is_cut_as_the_models_tokenizer_cuts_it():
    assert [(text, _cut(text)) for text, _ in PIECES] == PIECES
