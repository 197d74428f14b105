"""Every two options: the text of plain decoding, or a sentence; see `option_pairs`.

Drafts are right now and then, and the target's text is what it writes without any. What two ranks
write is compared in `tests/cluster/test_tensor_parallel.py`.
"""

from pathlib import Path

import pytest

from cluster.model_fit import check_fit
from deployments.args import parse_options
from tests.deployments.option_pairs import (
    INT8,
    PAIRS,
    REFUSED,
    TWO_RANKS,
    Pair,
    PlainTexts,
    name_of,
    options_of,
    save_models,
    write,
)
from workers.errors import ConfigError
from workers.quantization import PACKAGES_OF, is_installed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def plain_texts() -> PlainTexts:
    return PlainTexts()


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids=name_of)
async def test_two_options_change_no_text(
    pair: Pair, folder: Path, plain_texts: PlainTexts
) -> None:
    if INT8 in pair and not is_installed(PACKAGES_OF["int8"]):
        pytest.skip(f"needs {PACKAGES_OF['int8']}")
    args = parse_options(options_of(pair, folder))
    check_fit(args, None)
    if TWO_RANKS in pair:
        return
    texts = await write(args)
    assert texts.token_ids == await plain_texts.of(args)
    assert texts.sources == {*args.drafters}


@pytest.mark.parametrize("pair", REFUSED, ids=name_of)
def test_what_is_not_served_is_said(pair: Pair, folder: Path) -> None:
    options = options_of(pair, folder)
    with pytest.raises(ConfigError) as caught:
        check_fit(parse_options(options), None)
    assert str(caught.value) == REFUSED[pair].format(target=repr(options["target"]))
