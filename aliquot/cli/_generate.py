"""`aliquot generate`: a trained model of the zoo continues texts."""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError, counted, printable
from ._data import MergeFile, VocabFile, chosen_tokenizer
from ._devices import use_devices
from ._groups import option
from ._launch_options import LaunchOptions, joined, launch_again
from ._options import (
    Json,
    NetworkGbps,
    PlannedCluster,
    VirtualDevices,
    ZooName,
    read_cluster,
    read_plan,
    with_network,
)
from ._plan_options import MethodOptions
from ._session import Session, in_its_encoding, session

if TYPE_CHECKING:
    from .._generation import Generator
    from ..data import Tokenizer
    from ..plans import Plan
    from ..runtime import Checkpoints
    from ..zoo import Inference


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """The prompts as tokens, and the tokenizer; None if they were given as tokens."""

    prompts: tuple[tuple[int, ...], ...]
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextOptions:
    """What is continued, how far, and by which tokenizer."""

    prompt: list[str] | None = option("Text to be continued; repeatable, for several at once.")
    tokens: list[str] | None = option(
        "The same as numbers of tokens, which then are the answer, too.", metavar="ID,ID,..."
    )
    max_tokens: int = option("How many tokens to add, at most.", 64)
    temperature: float | None = option(
        "Draw each token as the model finds it likely, with logits divided by this; 0, the"
        " default, takes the most likely one.",
        min=0,
    )
    top_k: int | None = option("Draw only among so many of the most likely tokens.", min=1)
    seed: int | None = option(
        "Of what is drawn; 0 by default. The same one gives the same text.", min=0
    )
    cache: int | None = option(
        "Place in the cache for prompt and answer; by default the plan's, or as needed.",
        metavar="TOKENS",
    )
    tokenizer: Path | None = option(
        "JSON file of the tokenizer that the data was made by.", metavar="FILE"
    )
    vocab_file: VocabFile = None
    merge_file: MergeFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenPlanOptions:
    """How the step of a token is planned, or which plan it has."""

    plan_file: Path | None = option(
        "A plan that --save-plan wrote; by default a plan is made.", names="--plan", metavar="PLAN"
    )
    save_plan: Path | None = option("Write the plan of a token to this file.", metavar="FILE")
    dtype: str | None = option("Dtype to compute in; by default that of the training.")
    cluster: PlannedCluster = "detect"
    network_gbps: NetworkGbps = None
    devices: VirtualDevices = None


def generate(
    *,
    model: ZooName,
    checkpoint: Path = option(
        "The trained weights: a run of aliquot train, a folder of checkpoints, or one of Hugging"
        " Face with config.json and *.safetensors.",
        ...,
        metavar="RUN",
    ),
    method_options: MethodOptions,
    launch_options: LaunchOptions,
    asked: _TextOptions,
    planned: _TokenPlanOptions,
    as_json: Json = False,
) -> None:
    """Continue texts with a model that `aliquot train` has trained, with the most likely tokens or
    with drawn ones.
    """
    with session(as_json) as say:
        if asked.max_tokens < 1:
            raise InputError(f"--max-tokens must be at least 1, got {asked.max_tokens}.")
        if bool(asked.prompt) == bool(asked.tokens):
            raise InputError("give what is to be continued, as --prompt TEXT or --tokens ID,ID,...")
        if planned.plan_file is not None and method_options != MethodOptions():
            raise InputError(
                f"--plan {planned.plan_file} says how the model runs: leave --method and the like"
                " out."
            )
        if (asked.top_k is not None or asked.seed is not None) and not asked.temperature:
            given = "--seed" if asked.top_k is None else "--top-k"
            raise InputError(
                f"{given} is for tokens that are drawn, and the most likely one is taken: add"
                " --temperature 1."
            )
        method_options.check(None)
        launch_options.check(devices=planned.devices, has_plan=planned.plan_file is not None)
        if launch_options.starts_others:
            launch_again(launch_options, None, say, all_say_the_same=True)
            return
        with joined(launch_options):
            here = use_devices(planned.devices)
            from .._generation import Generator, Sampling
            from ..cluster import Cluster
            from ..zoo import is_hugging_face
            from ._resume import opened
            from ._train_plan import check_devices

            source: Checkpoints | None = None
            files = (asked.tokenizer, asked.vocab_file, asked.merge_file)
            if is_hugging_face(checkpoint):
                if asked.prompt and not any(files):
                    files = (_own_tokenizer(checkpoint), None, None)
                meta = _as_meta(model, files)
            else:
                source = opened(checkpoint, "--checkpoint")
                meta = source.record(source.numbers()[-1]).meta
            texts = _texts(asked.prompt, asked.tokens, meta, files)
            plan, cache = None, asked.cache
            if planned.plan_file is not None:
                plan = read_plan(planned.plan_file)
                check_devices(plan, len(here))
                cache = cache or _place_in_cache(plan)
            built = _model(model, meta, texts, asked.max_tokens, cache, planned.dtype)
            where = (
                Cluster.detect(here)
                if planned.cluster == "detect"
                else read_cluster(planned.cluster)
            )
            generator = Generator(
                built,
                vocabulary=_vocabulary(built, texts),
                sampling=Sampling(
                    temperature=asked.temperature, top_k=asked.top_k, seed=asked.seed or 0
                )
                if asked.temperature
                else None,
                decode_plan=plan,
                cluster=with_network(where, planned.network_gbps),
                method=method_options.read(),
                num_micro_batches=method_options.wanted_micro_batches,
            )
            if planned.save_plan is not None:
                generator.plan.save(planned.save_plan)
            params = _weights(generator, source, checkpoint, model, say)
            answers = _stream(generator, params, texts, asked.max_tokens, say)
            _tell(texts, answers, say)


def _own_tokenizer(folder: Path) -> Path:
    """The file of the tokenizer in a folder of Hugging Face."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(
            f"{folder} has no tokenizer.json to read the prompt by: give one with --tokenizer, or"
            " give the prompt as --tokens."
        )
    return file


def _as_meta(name: str, files: tuple[Path | None, Path | None, Path | None]) -> dict[str, Any]:
    """What a checkpoint of aliquot would say of a model of Hugging Face."""
    from ..zoo import as_fields
    from ._model import zoo_config

    config = zoo_config(name, {})
    if config is None:
        raise InputError(
            f"{name} is no model of the zoo: name the config.json beside the weights in its place."
        )
    used = chosen_tokenizer(*files).sha256 if any(files) else "bytes"
    return {"settings": {"model": as_fields(config)}, "data": {"tokenizer": used}}


def _texts(
    prompts: Sequence[str] | None,
    tokens: Sequence[str] | None,
    meta: dict[str, Any],
    files: tuple[Path | None, Path | None, Path | None],
) -> _Texts:
    """What is to be continued, by the tokenizer of the training data.

    Raises:
        InputError: a prompt is empty or no list of numbers, or the tokenizer is another.
    """
    used = (meta.get("data") or {}).get("tokenizer", "bytes")
    if prompts is None:
        numbers = [each.replace(",", " ").split() for each in tokens or ()]
        wrong = [n for n in itertools.chain(*numbers) if not n.isdecimal()]
        if wrong or not all(numbers):
            raise InputError(
                f"--tokens takes numbers of tokens, such as 72,101, and {wrong[0]!r} is none."
                if wrong
                else "--tokens is empty: a text begins with one token at least."
            )
        ids = tuple(tuple(map(int, each)) for each in numbers)
        given = chosen_tokenizer(*files) if any(files) else None
        return _Texts(prompts=ids, tokenizer=given)
    chosen = chosen_tokenizer(*files)
    if used not in ("bytes" if chosen.name == "bytes" else chosen.sha256, chosen.sha256):
        what = "text as bytes" if used == "bytes" else "a tokenizer with a file"
        raise InputError(
            f"the model was trained on {what}, and the prompt is read by {chosen.name}: its tokens"
            " would mean something else. "
            + (
                "Leave --tokenizer out."
                if used == "bytes"
                else "Give the file that aliquot data was given, with --tokenizer, or --vocab-file"
                " and --merge-file; or give the prompt as --tokens."
            )
        )
    encoded = tuple(tuple(chosen.encode(text.encode()).tolist()) for text in prompts)
    if not all(encoded):
        raise InputError("--prompt is empty: a text begins with one token at least.")
    return _Texts(prompts=encoded, tokenizer=chosen)


def _model(
    name: str,
    meta: dict[str, Any],
    texts: _Texts,
    max_tokens: int,
    cache: int | None,
    dtype: str | None,
) -> Inference:
    """The model as it was trained, with place for the prompts and the answers.

    Raises:
        InputError: it is another model, or one without decode; or a prompt is too long.
    """
    from ..zoo import build_inference, configure

    settings = meta.get("settings") or {"model": name}
    trained = settings["model"]
    if isinstance(trained, str) and trained != name:
        raise InputError(
            f"the checkpoint is of {trained}, not of {name}. Type aliquot generate {trained}."
        )
    overrides = settings.get("overrides") or {}
    config: Any = configure(name, **overrides) if isinstance(trained, str) else None
    seq_len = getattr(config, "seq_len", 0) if config else trained.get("seq_len", 0)
    longest = max(map(len, texts.prompts))
    place = cache or min(longest + max_tokens, seq_len) or longest
    if longest > place:
        limit = f"--cache {cache}" if cache else f"{name}'s seq_len of {seq_len}"
        raise InputError(
            f"the prompt has {longest} tokens, and the cache place for {place} ({limit}): what does"
            " not fit could not be attended to. Shorten the prompt"
            f"{', or give a larger --cache' if cache else ''}."
        )
    return build_inference(
        trained,
        len(texts.prompts),
        overrides=overrides or None,
        dtype=dtype or settings.get("dtype"),
        scan=bool(settings.get("scan")),
        cache_len=place,
        prompt_len=longest,
    )


def _place_in_cache(plan: Plan) -> int | None:
    """The positions of the cache that a plan is for; None if it is for another function."""
    # Keys are (batch, positions, heads, head size), perhaps behind a dim for the layers.
    caches = [item.shape for item in plan.inputs if item.path.startswith("cache.layers")]
    return caches[0][-3] if caches and len(caches[0]) > 3 else None


def _vocabulary(model: Inference, texts: _Texts) -> int:
    """The number of tokens that may be chosen.

    Raises:
        InputError: a prompt has tokens that the model does not know.
    """
    known = model.config.vocab_size
    largest = max(max(prompt) for prompt in texts.prompts)
    if largest >= known:
        raise InputError(
            f"the prompt has token {largest}, and {model.config.name} knows {known}: 0 to"
            f" {known - 1}."
        )
    return min(known, texts.tokenizer.vocabulary) if texts.tokenizer else known


def _weights(
    generator: Generator, source: Checkpoints | None, path: Path, name: str, say: Session
) -> Any:
    """The parameters of the newest checkpoint, or of a model of Hugging Face if there is no
    `source`, each where the plan puts it.
    """
    import jax

    fresh = generator.init(jax.random.key(0))
    if source is None:
        from ..zoo import read_weights

        params, notes = read_weights(path, generator.model.config, fresh)
        for line in (*notes, f"with the weights in {path}"):
            say.note(line)
        return params
    from ._resume import restored_weights

    restored, notes = restored_weights(source, fresh, path, name)
    for line in notes:
        say.note(line)
    if restored.new:
        some = ", ".join(restored.new[:3])
        raise InputError(
            f"the checkpoint in {path} lacks {counted(len(restored.new), 'array')} of {name}:"
            f" {some}{', ...' * (len(restored.new) > 3)}. Name a run of this model."
        )
    say.note(f"with the weights in {path} (step {restored.number})")
    return restored.state["params"]


def _stream(
    generator: Generator, params: Any, texts: _Texts, max_tokens: int, say: Session
) -> list[list[int]]:
    """The new tokens of each text. A single text is shown as it grows."""
    import jax

    answers: list[list[int]] = [[] for _ in texts.prompts]
    chosen, shown = texts.tokenizer, b""
    end = None if chosen is None or chosen.name == "bytes" else chosen.end
    shows = len(answers) == 1 and chosen is not None and not say.as_json
    shows = shows and jax.process_index() == 0
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    for count, row in enumerate(generator.tokens(params, texts.prompts), 1):
        for answer, token in zip(answers, row.tolist(), strict=True):
            if end is None or end not in answer:
                answer.append(token)
        if shows and chosen is not None:
            # Characters may consist of several tokens, and tokens be parts of characters.
            text = chosen.decode(answers[0])
            if text.startswith(shown):
                _write(characters.decode(text[len(shown) :]))
                shown = text
        if count == max_tokens or (end is not None and all(end in each for each in answers)):
            break
    else:
        say.note(f"the cache is full, with {generator.model.settings['cache_len']} tokens.")
    if shows:
        _write(characters.decode(b"", final=True) + "\n")
    return answers


def _write(text: str) -> None:
    sys.stdout.write(in_its_encoding(printable(text, keep="\n\t"), sys.stdout))
    sys.stdout.flush()


def _tell(texts: _Texts, answers: Sequence[Sequence[int]], say: Session) -> None:
    chosen = texts.tokenizer
    decoded = [
        chosen.decode(each).decode("utf-8", "replace") if chosen else None for each in answers
    ]
    if chosen is None:
        say.show("\n".join(",".join(map(str, each)) for each in answers))
    elif len(answers) > 1:
        prompts = [chosen.decode(each).decode("utf-8", "replace") for each in texts.prompts]
        say.show("\n\n".join(f"{p}|{text}" for p, text in zip(prompts, decoded, strict=True)))
    say.finish({"texts": decoded, "tokens": answers})
