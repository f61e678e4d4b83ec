"""The lists: which functions of torch's and math's, and which attributes of what a block holds, it may use.

``docs/security.md`` shows them.
"""

from __future__ import annotations

__all__ = [
    "ATTRIBUTES",
    "DTYPES",
    "EXCEPTIONS",
    "LINALG",
    "MATH",
    "MODEL",
    "NN",
    "TENSOR",
    "TENSOR_ATTRIBUTES",
    "TORCH",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DTYPES = _words(
    "bool uint8 int8 int16 int32 int64 short int long half float double float16 bfloat16 float32 float64 "
    "float8_e4m3fn float8_e5m2 uint16 uint32 uint64"
)

_ELEMENTWISE = _words(
    "abs absolute neg negative positive sign sgn signbit square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin "
    "cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh arctan2 sigmoid logit erf erfc erfinv ceil floor "
    "round trunc frac reciprocal relu clamp clip clamp_min clamp_max nan_to_num lerp addcmul addcdiv add sub "
    "subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power hypot logaddexp "
    "logaddexp2 maximum minimum fmax fmin eq ne lt le gt ge less less_equal greater greater_equal not_equal isclose "
    "isnan isinf isfinite isposinf isneginf logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
    "bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift xlogy deg2rad rad2deg copysign ldexp digamma "
    "lgamma where masked_fill tril triu"
)
_REDUCTIONS = _words(
    "sum mean std var std_mean var_mean prod max min amax amin aminmax argmax argmin all any median nanmedian mode "
    "quantile nanquantile nansum nanmean logsumexp norm dist cumsum cumprod cummax cummin logcumsumexp "
    "count_nonzero softmax log_softmax topk kthvalue sort argsort msort unique unique_consecutive histc bincount "
    "diff trace cov corrcoef nonzero argwhere numel"
)
_SHAPES = _words(
    "reshape view_as flatten unflatten squeeze unsqueeze transpose swapaxes swapdims permute movedim moveaxis t "
    "flip fliplr flipud roll rot90 expand_as broadcast_to repeat_interleave tile chunk split tensor_split unbind "
    "select narrow index_select masked_select gather take take_along_dim scatter scatter_add scatter_reduce "
    "index_add index_copy index_fill index_put masked_scatter diagonal diag diag_embed diagflat clone ravel adjoint "
    "select_scatter slice_scatter diagonal_scatter"
)
_PRODUCTS = _words("matmul mm bmm mv dot inner outer ger addmm addmv addbmm baddbmm kron cross tensordot vdot cdist")

TORCH = (
    _ELEMENTWISE
    | _REDUCTIONS
    | _SHAPES
    | _PRODUCTS
    | DTYPES
    | _words(
        "tensor as_tensor zeros ones full zeros_like ones_like full_like arange linspace logspace eye rand randn "
        "randint randperm rand_like randn_like randint_like normal bernoulli multinomial cat concat concatenate "
        "stack hstack vstack dstack column_stack row_stack einsum meshgrid cartesian_prod combinations "
        "broadcast_tensors block_diag bucketize searchsorted equal allclose isin is_tensor is_floating_point "
        "layer_norm rms_norm cosine_similarity pairwise_distance tril_indices triu_indices result_type can_cast "
        "promote_types finfo iinfo Tensor Size device nn linalg special fft pi e inf nan"
    )
) - {"view_as"}

TENSOR = (
    _ELEMENTWISE
    | _REDUCTIONS
    | _SHAPES
    | _PRODUCTS
    | frozenset(f"{name}_" for name in _ELEMENTWISE if name not in {"signbit", "where", "absolute", "positive"})
    | _words(
        "scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_put_ masked_fill_ "
        "masked_scatter_ copy_ fill_ zero_ fill_diagonal_ renorm renorm_ cumsum_ cumprod_ squeeze_ unsqueeze_ t_ "
        "transpose_ view expand repeat contiguous size dim ndimension nelement stride item tolist to cpu float "
        "double half bfloat16 int long bool short char byte type_as detach new_zeros new_ones new_full new_tensor "
        "equal allclose is_floating_point is_contiguous is_inference element_size multinomial bernoulli isin "
        "requires_grad_"
    )
) - _words("numel_ requires_grad_ nn tril_ triu_") | _words("tril_ triu_ numel")
TENSOR_ATTRIBUTES = _words("shape dtype device ndim T mT H mH itemsize nbytes is_cuda is_cpu requires_grad")

NN = _words(
    "relu gelu silu mish elu selu leaky_relu softplus softsign hardtanh hardsigmoid hardswish sigmoid tanh "
    "logsigmoid glu softmax log_softmax normalize layer_norm rms_norm cosine_similarity pairwise_distance linear "
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div cross_entropy nll_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits one_hot pad scaled_dot_product_attention threshold"
)
LINALG = _words(
    "norm vector_norm matrix_norm svd svdvals qr eigh eigvalsh eigvals inv pinv solve lstsq det slogdet matrix_rank "
    "cholesky matmul cross vecdot diagonal multi_dot cond solve_triangular"
)
SPECIAL = _words(
    "expit logit softmax log_softmax logsumexp entr erf erfc erfinv xlogy log1p expm1 exp2 sinc psi digamma"
)
FFT = _words("fft ifft rfft irfft fft2 ifft2 fftshift ifftshift fftfreq rfftfreq")
MATH = _words(
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh degrees dist e erf erfc exp exp2 expm1 fabs "
    "floor fmod frexp fsum gamma gcd hypot inf isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p "
    "log2 modf nan nextafter pi pow radians remainder sin sinh sqrt tan tanh tau trunc ulp"
)

MODEL = _words(
    "logits samples embed pos_embed final_norm resid_pre resid_mid resid_post attn_out mlp_out router_logits q k v "
    "attn_pattern apply_final_norm unembed get tokenizer"
)
"""Of the model, besides its modules."""

TOKENIZER = _words("decode encode convert_ids_to_tokens convert_tokens_to_ids")
TOKENIZER_VALUES = _words("eos_token_id bos_token_id pad_token_id unk_token_id eos_token bos_token vocab_size")

EXCEPTIONS = _words(
    "Exception ArithmeticError AssertionError AttributeError FloatingPointError IndexError KeyError LookupError "
    "NameError NotImplementedError OverflowError RecursionError RuntimeError StopIteration TypeError "
    "UnboundLocalError ValueError ZeroDivisionError UnicodeError"
)

_RESULTS = _words(
    "prompt prompt_token_ids prompt_logprobs outputs finished num_cached_tokens saves error text token_ids index "
    "cumulative_logprob logprobs finish_reason stop_reason logprob rank decoded_token"
)
ATTRIBUTES: dict[str, frozenset[str]] = {
    "builtins.list": _words("append extend insert remove pop clear index count sort reverse copy"),
    "builtins.tuple": _words("index count"),
    "builtins.dict": _words("get items keys values pop popitem update setdefault clear copy"),
    "builtins.set": _words(
        "add discard remove pop clear copy update union intersection difference symmetric_difference issubset "
        "issuperset isdisjoint"
    ),
    "builtins.frozenset": _words(
        "union intersection difference symmetric_difference issubset issuperset isdisjoint copy"
    ),
    "builtins.str": _words(
        "capitalize casefold count encode endswith find index isalnum isalpha isascii isdecimal isdigit "
        "isidentifier islower isnumeric isprintable isspace istitle isupper join lower lstrip partition "
        "removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip "
        "swapcase title upper ljust rjust center zfill"
    ),
    "builtins.bytes": _words("decode hex startswith endswith find count"),
    "builtins.int": _words("bit_length bit_count real imag numerator denominator is_integer conjugate"),
    "builtins.bool": _words("bit_length real imag"),
    "builtins.float": _words("is_integer real imag hex as_integer_ratio conjugate"),
    "builtins.complex": _words("real imag conjugate"),
    "builtins.slice": _words("start stop step indices"),
    "builtins.range": _words("start stop step index count"),
    "torch.Size": _words("numel index count"),
    "torch.dtype": _words("itemsize is_floating_point is_complex"),
    "torch.device": _words("type index"),
    "torch.finfo": _words("bits eps max min tiny smallest_normal resolution dtype"),
    "torch.iinfo": _words("bits max min dtype"),
    "builtins.BaseException": _words("args"),
    "insitu.tree.node.Node": _words("output input inputs skip source next get"),
    "insitu.tree.source.OperationNode": _words("output input inputs skip source"),
    "insitu.tree.streams.LayerStream": frozenset(),
    "insitu.tree.cache.Cache": _words("keys values items get"),
    "insitu.tree.cache.Cached": _words("output input inputs steps"),
    "insitu.net.refs.Record": _words("index count"),
    "insitu.engine.client.tracer.Tracer": _words("result tokens positions_of iter all barrier next stop cache"),
    "vllm.outputs.RequestOutput": _RESULTS,
    "vllm.outputs.CompletionOutput": _RESULTS,
    "vllm.logprobs.Logprob": _RESULTS,
    "insitu.net.outputs.RequestOutput": _RESULTS,
    "insitu.net.outputs.CompletionOutput": _RESULTS,
    "insitu.net.outputs.Logprob": _RESULTS,
}
"""By class; a class derived from it may do the same."""
