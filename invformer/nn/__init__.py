"""Layers: contractive attention and feed-forward, invertible residual layers, stacks, the model."""

from invformer.nn.attention import ContractiveL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.certificate import Certificate, NoCertificateError
from invformer.nn.coupling import CouplingBlock, CouplingStack
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.feed_forward import ContractiveFeedForward, FeedForward
from invformer.nn.kim_attention import L2Attention, PaperContractiveL2Attention
from invformer.nn.position_bias import CausalMask, RelativePositionBias, VisibilityMask
from invformer.nn.proof import certify, enforce
from invformer.nn.residual import InvertibleBlock, InvertibleResidual
from invformer.nn.scaling import ActivationNorm, DiagonalScaling, written_channels
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock, PreNormStack
