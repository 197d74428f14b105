"""Model execution: the target that verifies and the drafters that propose. Never imports ray."""

import logging

# Transformers imports these packages wherever they are installed. They warn then: in each process
# of kernels for other machines that they lack, and in each layer of each step of its precision.
for _package in ("torchao", "bitsandbytes", "torch.utils._pytree"):
    logging.getLogger(_package).setLevel(logging.ERROR)
