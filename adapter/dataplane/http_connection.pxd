cdef int _IDLE, _SENDING, _AWAITING_HEAD, _READING_BODY, _DONE, _BROKEN
cdef int _BEGUN, _SENT, _HEAD, _ENDED, _KEPT, _ANSWERED
cdef int _OK
cdef Py_ssize_t _JOINED_BYTES

cdef class Connection:
    cdef public int state, status
    cdef public object transport
    cdef public double heard
    cdef public list headers
    cdef public object length
    cdef object _owner, _faults, _loop, _readable, _timer, _receiver, _record
    cdef object _fault, _left, _parser
    cdef public double seconds
    cdef double _due
    cdef bint _is_held, _is_sent, _is_kept, _is_complete, _is_stream, _is_probe
    cdef bytes _raw, _last_head
    cdef Py_ssize_t _last_bytes, _quiet
    cdef list _pieces

    cpdef begin(self, receiver, record, bint is_stream=*, bint is_probe=*)
    cpdef send(self, bytes head, bytes body)
    cpdef bint is_quiet(self)
    cdef _end_as_before(self, bytes data)
    cdef _tell_whole(self, receiver, bytes whole)
