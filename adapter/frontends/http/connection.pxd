from adapter.frontends.http.fast_path cimport FastPath, Inference
from adapter.frontends.http.head cimport Head, Heads

cdef Py_ssize_t _AHEAD_BYTES, _SHORT_BYTES, _END_BYTES
cdef int _CR, _IDLE, _HEAD, _FAST, _APPLICATION, _LINGERING, _CLOSING

cdef class Connection:
    cdef public object transport
    cdef public int state
    cdef public bint is_full, has_ended, had_request, is_for_good
    cdef public Py_ssize_t left
    cdef public bytes ahead
    cdef object _server, _loop, _application, _arrival
    cdef FastPath _path
    cdef Heads _heads
    cdef double _since, _write_due, _gone_due
    cdef Py_ssize_t _kept
    cdef bytes _late
    cdef bint _is_crowded
    cdef dict _known
    cdef Inference _inference

    cdef _received(self, bytes data)
    cdef _pass_on(self, bytes data)
    cdef _read_head(self, bytes data, Py_ssize_t begin=*)
    cdef _read_whole_head(self, bytes raw, bytes behind)
    cdef _begin(self, Head head, bytes raw, bytes body)
    cdef _read_body(self, bytes data)
    cdef _put_ahead(self, bytes behind)
    cdef bint _keeps(self, bytes data) except -1
    cdef bytes _take_ahead(self)
    cdef _arrived(self, Py_ssize_t size)
    cpdef answered(self, bint is_last)
    cpdef hold_back(self)
    cdef _read_on(self)
    cdef _next(self)
    cdef _enter(self, int state)
    cpdef close(self)
