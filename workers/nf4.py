"""Weights in 4 bits, in blocks of 32: transformers has no option for it, and takes blocks of 64.

The largest of the weights that share a scale decides how coarse all of them become, so smaller
blocks lose less. 32 is what GGUF (Q4_0) and MXFP4 have, and the smallest that bitsandbytes takes.
"""

from typing import Any

from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

METHOD = "bitsandbytes_nf4"
"""The name by which transformers finds the quantizer of this module."""
BLOCK_SIZE = 32
"""Weights that share a scale."""


class Nf4Config(BitsAndBytesConfig):
    """The `quantization_config` that has `from_pretrained` use the quantizer of this module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", **options
        )
        self.quant_method = METHOD  # type: ignore[assignment]  # not one of transformers' own


@register_quantizer(METHOD)
class Nf4Quantizer(Bnb4BitHfQuantizer):
    """Transformers' own quantizer for 4 bits, with blocks of BLOCK_SIZE weights."""

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, *args: Any, **kwargs: Any
    ) -> None:
        super()._process_model_before_weight_loading(model, *args, **kwargs)
        for weight in model.parameters():
            if hasattr(weight, "blocksize"):  # bitsandbytes quantizes it when it gets its numbers
                weight.blocksize = BLOCK_SIZE
