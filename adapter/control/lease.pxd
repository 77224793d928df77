from adapter.core.residency.usage cimport Usage

cimport cython

cdef int _NEW, _HELD, _ABANDONED, _ENDED

cdef class Leases:
    cdef public long abandoned, begun, ended
    cdef public bint is_paused
    cdef public object failed, became_idle
    cdef public dict arriving
    cdef long _max_abandoned
    cdef dict _drained

    @cython.locals(usage=Usage)
    cpdef Lease of(self, record)
    cpdef arrives(self, Lease lease, refuse)
    cpdef has_ended(self, Lease lease)
    cpdef was_last(self, record)

cdef class Lease:
    cdef public object record
    cdef Usage _usage
    cdef public int state
    cdef double _begun
    cdef Leases _leases

    cpdef bint is_lost(self)
    cpdef bint is_held(self)
    @cython.locals(usage=Usage)
    cpdef begin(self, now=*)
    cpdef arrives(self, refuse)
    cpdef abandon(self)
    @cython.locals(usage=Usage, leases=Leases)
    cpdef end(self, error=*, now=*)
