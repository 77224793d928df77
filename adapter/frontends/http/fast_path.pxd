from adapter.control.lease cimport Lease
from adapter.frontends.http.head cimport Head, Operation
from adapter.telemetry.traffic cimport Served

cimport cython

cdef int _OK
cdef int _NONE, _GATHERING, _CONNECTING, _SENDING, _WAITING, _ANSWERING, _REFUSING, _SKIPPING

cdef class FastPath:
    cdef public object control, dataplane, instrumentation, clock, budget
    cdef public bint accepts_requests

cdef class Inference:
    cdef object _client, _contract, _upstream, _holding, _check, _task, _answer, _waited
    cdef FastPath _path
    cdef Head _head
    cdef Lease _lease
    cdef int _stage, _status
    cdef bint _is_whole, _is_blocked, _is_last
    cdef double _begun, _callers, _asked, _heard
    cdef list _pieces
    cdef bytes _raw, _body
    cdef readonly bint was_found, was_sent

    cpdef bint begin(self, Head head, bytes raw, bytes body)
    cdef _take(self, Py_ssize_t size)
    cdef bint _begin_body(self, bytes body, Py_ssize_t length) except -1
    cdef bint _serve(self, bytes body) except -1
    cdef _to_triton(self, bytes body)
    cdef Lease _find_lease(self)
    cdef _send(self, upstream, bytes body)
    cdef _pass_on(self, bytes piece)
    cpdef answered_whole(self, bytes body)
    @cython.locals(operation=Operation)
    cdef bytes _begin_answer(self, list headers, length)
    @cython.locals(served=Served, head=Head)
    cdef _over(self)
