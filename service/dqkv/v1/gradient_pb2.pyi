from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_BF16: _ClassVar[DataType]
    DATA_TYPE_FP16: _ClassVar[DataType]
    DATA_TYPE_FP32: _ClassVar[DataType]

class TensorRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_ROLE_UNSPECIFIED: _ClassVar[TensorRole]
    TENSOR_ROLE_Q: _ClassVar[TensorRole]
    TENSOR_ROLE_K: _ClassVar[TensorRole]
    TENSOR_ROLE_V: _ClassVar[TensorRole]
    TENSOR_ROLE_DOUT: _ClassVar[TensorRole]
    TENSOR_ROLE_OUT: _ClassVar[TensorRole]
    TENSOR_ROLE_DELTA: _ClassVar[TensorRole]
    TENSOR_ROLE_SOFTMAX_LSE: _ClassVar[TensorRole]
    TENSOR_ROLE_DLSE: _ClassVar[TensorRole]
    TENSOR_ROLE_SINK: _ClassVar[TensorRole]
    TENSOR_ROLE_DQ: _ClassVar[TensorRole]
    TENSOR_ROLE_DK: _ClassVar[TensorRole]
    TENSOR_ROLE_DV: _ClassVar[TensorRole]
    TENSOR_ROLE_DSINK: _ClassVar[TensorRole]

class Arch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARCH_UNSPECIFIED: _ClassVar[Arch]
    ARCH_CPU: _ClassVar[Arch]
    ARCH_SM80: _ClassVar[Arch]
    ARCH_SM90: _ClassVar[Arch]
    ARCH_SM100: _ClassVar[Arch]

class LseScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LSE_SCOPE_UNSPECIFIED: _ClassVar[LseScope]
    LSE_SCOPE_GLOBAL: _ClassVar[LseScope]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_UNARY: _ClassVar[Transport]
    TRANSPORT_STREAM: _ClassVar[Transport]

class RegionAccess(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGION_ACCESS_UNSPECIFIED: _ClassVar[RegionAccess]
    REGION_ACCESS_READ: _ClassVar[RegionAccess]

class DeviceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_STATE_UNSPECIFIED: _ClassVar[DeviceState]
    DEVICE_STATE_STARTING: _ClassVar[DeviceState]
    DEVICE_STATE_OK: _ClassVar[DeviceState]
    DEVICE_STATE_LOST: _ClassVar[DeviceState]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_BF16: DataType
DATA_TYPE_FP16: DataType
DATA_TYPE_FP32: DataType
TENSOR_ROLE_UNSPECIFIED: TensorRole
TENSOR_ROLE_Q: TensorRole
TENSOR_ROLE_K: TensorRole
TENSOR_ROLE_V: TensorRole
TENSOR_ROLE_DOUT: TensorRole
TENSOR_ROLE_OUT: TensorRole
TENSOR_ROLE_DELTA: TensorRole
TENSOR_ROLE_SOFTMAX_LSE: TensorRole
TENSOR_ROLE_DLSE: TensorRole
TENSOR_ROLE_SINK: TensorRole
TENSOR_ROLE_DQ: TensorRole
TENSOR_ROLE_DK: TensorRole
TENSOR_ROLE_DV: TensorRole
TENSOR_ROLE_DSINK: TensorRole
ARCH_UNSPECIFIED: Arch
ARCH_CPU: Arch
ARCH_SM80: Arch
ARCH_SM90: Arch
ARCH_SM100: Arch
LSE_SCOPE_UNSPECIFIED: LseScope
LSE_SCOPE_GLOBAL: LseScope
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_UNARY: Transport
TRANSPORT_STREAM: Transport
REGION_ACCESS_UNSPECIFIED: RegionAccess
REGION_ACCESS_READ: RegionAccess
DEVICE_STATE_UNSPECIFIED: DeviceState
DEVICE_STATE_STARTING: DeviceState
DEVICE_STATE_OK: DeviceState
DEVICE_STATE_LOST: DeviceState

class Tensor(_message.Message):
    __slots__ = ("role", "dtype", "shape", "data", "region", "stream")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    role: TensorRole
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    region: RegionSlice
    stream: Streamed
    def __init__(self, role: _Optional[_Union[TensorRole, str]] = ..., dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., region: _Optional[_Union[RegionSlice, _Mapping]] = ..., stream: _Optional[_Union[Streamed, _Mapping]] = ...) -> None: ...

class Streamed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegionSlice(_message.Message):
    __slots__ = ("handle", "byte_offset", "strides")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BYTE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    byte_offset: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[bytes] = ..., byte_offset: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ...) -> None: ...

class Lengths(_message.Message):
    __slots__ = ("cu_seqlens", "seqused", "max_seqlen")
    CU_SEQLENS_FIELD_NUMBER: _ClassVar[int]
    SEQUSED_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQLEN_FIELD_NUMBER: _ClassVar[int]
    cu_seqlens: _containers.RepeatedScalarFieldContainer[int]
    seqused: _containers.RepeatedScalarFieldContainer[int]
    max_seqlen: int
    def __init__(self, cu_seqlens: _Optional[_Iterable[int]] = ..., seqused: _Optional[_Iterable[int]] = ..., max_seqlen: _Optional[int] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("left", "right", "causal", "sink_token_length")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKEN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    left: int
    right: int
    causal: bool
    sink_token_length: int
    def __init__(self, left: _Optional[int] = ..., right: _Optional[int] = ..., causal: _Optional[bool] = ..., sink_token_length: _Optional[int] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("softmax_scale", "window", "softcap", "deterministic", "grad_dtype", "arch", "lse_scope")
    SOFTMAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    GRAD_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    LSE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    softmax_scale: float
    window: Window
    softcap: float
    deterministic: bool
    grad_dtype: DataType
    arch: Arch
    lse_scope: LseScope
    def __init__(self, softmax_scale: _Optional[float] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., softcap: _Optional[float] = ..., deterministic: _Optional[bool] = ..., grad_dtype: _Optional[_Union[DataType, str]] = ..., arch: _Optional[_Union[Arch, str]] = ..., lse_scope: _Optional[_Union[LseScope, str]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("role", "region")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    role: TensorRole
    region: RegionSlice
    def __init__(self, role: _Optional[_Union[TensorRole, str]] = ..., region: _Optional[_Union[RegionSlice, _Mapping]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("tensors", "queries", "keys", "options", "outputs")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    queries: Lengths
    keys: Lengths
    options: Options
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., queries: _Optional[_Union[Lengths, _Mapping]] = ..., keys: _Optional[_Union[Lengths, _Mapping]] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ...) -> None: ...

class BackwardRequest(_message.Message):
    __slots__ = ("problem", "request_id", "checksum")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    problem: Problem
    request_id: str
    checksum: int
    def __init__(self, problem: _Optional[_Union[Problem, _Mapping]] = ..., request_id: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class BackwardResponse(_message.Message):
    __slots__ = ("report", "gradients", "checksum")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    report: Report
    gradients: _containers.RepeatedCompositeFieldContainer[Tensor]
    checksum: int
    def __init__(self, report: _Optional[_Union[Report, _Mapping]] = ..., gradients: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., checksum: _Optional[int] = ...) -> None: ...

class BackwardStreamRequest(_message.Message):
    __slots__ = ("header", "data", "trailer")
    class Header(_message.Message):
        __slots__ = ("problem", "request_id", "total_bytes")
        PROBLEM_FIELD_NUMBER: _ClassVar[int]
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
        problem: Problem
        request_id: str
        total_bytes: int
        def __init__(self, problem: _Optional[_Union[Problem, _Mapping]] = ..., request_id: _Optional[str] = ..., total_bytes: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: BackwardStreamRequest.Header
    data: bytes
    trailer: Trailer
    def __init__(self, header: _Optional[_Union[BackwardStreamRequest.Header, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[Trailer, _Mapping]] = ...) -> None: ...

class Trailer(_message.Message):
    __slots__ = ("total_bytes", "checksum")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    checksum: int
    def __init__(self, total_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class BackwardStreamResponse(_message.Message):
    __slots__ = ("header", "data", "trailer")
    class Header(_message.Message):
        __slots__ = ("report", "gradients", "total_bytes")
        REPORT_FIELD_NUMBER: _ClassVar[int]
        GRADIENTS_FIELD_NUMBER: _ClassVar[int]
        TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
        report: Report
        gradients: _containers.RepeatedCompositeFieldContainer[Tensor]
        total_bytes: int
        def __init__(self, report: _Optional[_Union[Report, _Mapping]] = ..., gradients: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: BackwardStreamResponse.Header
    data: bytes
    trailer: Trailer
    def __init__(self, header: _Optional[_Union[BackwardStreamResponse.Header, _Mapping]] = ..., data: _Optional[bytes] = ..., trailer: _Optional[_Union[Trailer, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("arch", "kernel", "device", "softmax_lse_recomputed", "queued_s", "transfer_s", "device_s", "total_s")
    ARCH_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOFTMAX_LSE_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    arch: Arch
    kernel: str
    device: str
    softmax_lse_recomputed: bool
    queued_s: float
    transfer_s: float
    device_s: float
    total_s: float
    def __init__(self, arch: _Optional[_Union[Arch, str]] = ..., kernel: _Optional[str] = ..., device: _Optional[str] = ..., softmax_lse_recomputed: _Optional[bool] = ..., queued_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., device_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class EstimateRequest(_message.Message):
    __slots__ = ("problem",)
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    problem: Problem
    def __init__(self, problem: _Optional[_Union[Problem, _Mapping]] = ...) -> None: ...

class EstimateResponse(_message.Message):
    __slots__ = ("pairs", "flops", "input_bytes", "gradient_bytes", "device_s", "queue_s", "device", "arch", "transport")
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    pairs: int
    flops: float
    input_bytes: int
    gradient_bytes: int
    device_s: float
    queue_s: float
    device: str
    arch: Arch
    transport: Transport
    def __init__(self, pairs: _Optional[int] = ..., flops: _Optional[float] = ..., input_bytes: _Optional[int] = ..., gradient_bytes: _Optional[int] = ..., device_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., device: _Optional[str] = ..., arch: _Optional[_Union[Arch, str]] = ..., transport: _Optional[_Union[Transport, str]] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("posix", "memfd", "nbytes", "access", "label", "lease_s")
    POSIX_FIELD_NUMBER: _ClassVar[int]
    MEMFD_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    posix: PosixSharedMemory
    memfd: Memfd
    nbytes: int
    access: RegionAccess
    label: str
    lease_s: float
    def __init__(self, posix: _Optional[_Union[PosixSharedMemory, _Mapping]] = ..., memfd: _Optional[_Union[Memfd, _Mapping]] = ..., nbytes: _Optional[int] = ..., access: _Optional[_Union[RegionAccess, str]] = ..., label: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class PosixSharedMemory(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Memfd(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ("handle", "lease_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    lease_s: float
    def __init__(self, handle: _Optional[bytes] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewRegionRequest(_message.Message):
    __slots__ = ("handle", "lease_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    lease_s: float
    def __init__(self, handle: _Optional[bytes] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewRegionResponse(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class ListRegionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRegionsResponse(_message.Message):
    __slots__ = ("regions",)
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("handle", "label", "nbytes", "access", "lease_s", "in_use")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    label: str
    nbytes: int
    access: RegionAccess
    lease_s: float
    in_use: int
    def __init__(self, handle: _Optional[bytes] = ..., label: _Optional[str] = ..., nbytes: _Optional[int] = ..., access: _Optional[_Union[RegionAccess, str]] = ..., lease_s: _Optional[float] = ..., in_use: _Optional[int] = ...) -> None: ...

class ReleaseRegionRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...

class ReleaseRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeRegionRequest(_message.Message):
    __slots__ = ("handle", "byte_offset", "nbytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BYTE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    byte_offset: int
    nbytes: int
    def __init__(self, handle: _Optional[bytes] = ..., byte_offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ProbeRegionResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("version", "devices", "limits", "stream_port", "region_socket", "session", "notes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STREAM_PORT_FIELD_NUMBER: _ClassVar[int]
    REGION_SOCKET_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    limits: Limits
    stream_port: int
    region_socket: str
    session: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., stream_port: _Optional[int] = ..., region_socket: _Optional[str] = ..., session: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "archs", "state", "dtypes", "queue_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    archs: _containers.RepeatedScalarFieldContainer[Arch]
    state: DeviceState
    dtypes: _containers.RepeatedScalarFieldContainer[DataType]
    queue_s: float
    def __init__(self, name: _Optional[str] = ..., archs: _Optional[_Iterable[_Union[Arch, str]]] = ..., state: _Optional[_Union[DeviceState, str]] = ..., dtypes: _Optional[_Iterable[_Union[DataType, str]]] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes", "inline_bytes", "request_bytes", "regions", "lease_s", "head_dim", "stream_idle_s")
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    STREAM_IDLE_S_FIELD_NUMBER: _ClassVar[int]
    message_bytes: int
    inline_bytes: int
    request_bytes: int
    regions: int
    lease_s: float
    head_dim: int
    stream_idle_s: float
    def __init__(self, message_bytes: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., request_bytes: _Optional[int] = ..., regions: _Optional[int] = ..., lease_s: _Optional[float] = ..., head_dim: _Optional[int] = ..., stream_idle_s: _Optional[float] = ...) -> None: ...
