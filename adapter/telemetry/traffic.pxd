cdef int _NOTED

cdef class InFlight:
    cdef public long count

cdef class Served:
    cdef dict _names
    cdef object _trace_id
    cdef public InFlight in_flight
    cdef list _noted
    cdef public long fast, answers
    cdef public dict codes
    cdef public object total, upstream, own, callers

    cpdef count(self, code, double seconds, upstream_seconds=*, double callers_seconds=*, model_id=*)
    cpdef add_up(self)
