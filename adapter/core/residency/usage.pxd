cdef class Usage:
    cdef public long in_flight, abandoned, lost, served
    cdef public double answered_at, busy_since, used_at
    cdef public object latencies
