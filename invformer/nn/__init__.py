"""Layers: contractive attention and feed-forward, invertible residual layers, stacks, the model."""

from invformer.branches.dot_product import DotProductAttention
from invformer.branches.feed_forward.feed_forward import ContractiveFeedForward, FeedForward
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.branches.tied_l2.attention import ContractiveL2Attention
from invformer.branches.tied_l2.kim import L2Attention, PaperContractiveL2Attention
from invformer.nn.certificate import Certificate, NoCertificateError
from invformer.nn.coupling import CouplingBlock, CouplingStack
from invformer.nn.proof import certify, enforce
from invformer.nn.residual import InvertibleBlock, InvertibleResidual
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock, PreNormStack
from invformer.weights.position_bias import CausalMask, RelativePositionBias, VisibilityMask
from invformer.weights.scaling import ActivationNorm, DiagonalScaling, written_channels
