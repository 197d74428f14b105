"""The bundled draft with another tokenizer (`demo-retokenize`), to try and to measure such drafts.

The vector of a new token is the mean of those of the old tokens that spell it. With a permuted
vocabulary, where each token only has another id, that is the bundled draft itself. With a tokenizer
of another size, learnt from half of the files, the model is trained on the corpus for a while.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from cluster import bundled
from tandem.demo import training
from tandem.demo.corpus import END_OF_TEXT, Corpus, encode_documents, train_tokenizer
from tandem.demo.pair import save_model, save_tokenizer
from workers.spelling import Spelling
from workers.token_map import TokenMap

LEARNING_RATE = 4e-3
"""Half of what the bundled draft was trained with from nothing."""


def retokenize_draft(
    folder: Path, *, vocab_size: int | None, num_steps: int, seed: int, compile: bool
) -> None:
    """Write the bundled draft with a tokenizer of `vocab_size` tokens; with None, a permuted one,
    which needs no steps of training."""
    source = bundled.resolve(bundled.TARGET_NAME)
    if vocab_size is None:
        backend = AutoTokenizer.from_pretrained(source).backend_tokenizer
        save_tokenizer(permuted(backend, seed), folder)
        save_model(_with_tokenizer_of(folder, source), folder)
        return
    corpus = Corpus.load()
    tokenizer = train_tokenizer(corpus.training[::2], vocab_size)
    save_tokenizer(tokenizer, folder)
    model = _with_tokenizer_of(folder, source)
    held_out = encode_documents(tokenizer, corpus.held_out, seed)

    def evaluate(model: PreTrainedModel) -> float:
        return training.held_out_loss(model, held_out, window_len=512)

    options = training.TrainingOptions(
        num_steps=num_steps,
        learning_rate=LEARNING_RATE,
        weight_decay=0.02,
        seed=seed,
        compile=compile,
    )
    tokens = encode_documents(tokenizer, corpus.training, seed)
    training.train(model, tokens, training.text_loss, evaluate, options, "draft")
    save_model(model, folder)


def permuted(tokenizer: Tokenizer, seed: int) -> Tokenizer:
    """A BPE tokenizer that cuts text alike and has other ids for all its tokens."""
    content = json.loads(tokenizer.to_str())
    ids = list(range(tokenizer.get_vocab_size()))
    random.Random(seed).shuffle(ids)
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: ids[old] for token, old in vocabulary.items()}
    for token in content["added_tokens"]:
        token["id"] = ids[token["id"]]
    content["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(content))


@torch.no_grad()
def _with_tokenizer_of(folder: Path, source: str) -> LlamaForCausalLM:
    """The bundled draft, with a vector for every token of the tokenizer in a folder.

    Args:
        source: the folder of the tokenizer that the draft has had.
    """
    draft = LlamaForCausalLM.from_pretrained(
        bundled.resolve(bundled.DRAFT_NAME), dtype=torch.float32
    )
    new, old = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(source)
    token_map = TokenMap(
        Spelling(str(folder), new),
        Spelling(source, old),
        target_tokenizer=new,
        draft_tokenizer=old,
        target_size=len(new),
        draft_size=len(old),
    )
    embedding: Any = draft.get_input_embeddings()
    vectors = embedding.weight
    pieces = [list(token_map.pieces(token)) for token in range(len(new))]
    new_vectors = torch.stack([vectors[tokens].mean(0) for tokens in pieces])
    draft.resize_token_embeddings(len(new))
    embedding = draft.get_input_embeddings()
    embedding.weight.copy_(new_vectors)
    end = new.convert_tokens_to_ids(END_OF_TEXT)
    for config in (draft.config, draft.generation_config):
        config.bos_token_id = config.eos_token_id = config.pad_token_id = end
    return draft
