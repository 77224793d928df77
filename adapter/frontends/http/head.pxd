from adapter.frontends.http.head_scanner cimport Scanned
from adapter.telemetry.traffic cimport Served

cdef class Operation:
    cdef public str name
    cdef public bint is_v2
    cdef public Served served
    cdef public list answered
    cdef public object length
    cdef public bytes answer

cdef class Head:
    cdef public Operation operation
    cdef public str model_id
    cdef public Py_ssize_t length
    cdef public object contract, json_bytes
    cdef public bytes upstream_head, echoed
    cdef public bint is_typed

    cpdef Head with_lines(self, list lines)

cdef class Heads:
    cdef public str host
    cdef public dict known
    cdef object _calls, _contracts, _default_model, _sites
    cdef bint _invokes
    cdef Py_ssize_t _max_body
    cdef bytes _host
    cdef Operation _invoke, _infer, _invocations, _endpoint

    cpdef Head read(self, bytes raw)
    cdef Head _read(self, bytes raw)
    cdef _read_plain(self, Head head, Scanned scanned)
    cdef bint _knows_host(self, bytes host) except -1
    cdef _read_invoke(self, Head head, Operation operation, model_id, Scanned scanned)
    cdef bint _is_invocation(self, Head head, name, list sent, Scanned scanned) except -1
    cdef bint _is_framed(self, Head head, bytes target, list sent, bytes prefix) except -1

cdef bint _is_name(bytes name)
cdef list _forwarded(dict fields)
