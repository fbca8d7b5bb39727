package residence

import (
	"errors"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// Copies are the copies of host memory that a device keeps from run to run of machines: one of each
// piece of memory, however many machines use it. A device with a method Copies shares them among
// all its machines.
type Copies struct {
	mu        sync.Mutex
	all       map[backend.Buffer]*Copy // by host memory
	once      map[recipe]*Once
	abandoned []func() error // close machines that nobody refers to
}

// Use is what a user of a copy does with it.
type Use uint8

// The uses.
const (
	Reads  Use = iota // the host may write between runs, and a run compares
	Holds             // nothing writes
	Writes            // the user does
)

// Copy is the copy of one piece of memory. Its fields belong to the machine that runs: those that
// share memory do not run at the same time.
type Copy struct {
	Host   backend.Buffer // whose elements it has
	Device backend.Buffer // not allocated before a machine needs it
	// Fresh is whether Device has the present elements. Those of Host are older where a machine
	// has written Device since.
	Fresh bool
	// Sent is what Host held when it was copied, where only the host writes. It tells whether the
	// host has written since.
	Sent []byte

	source Source // what Holds has, when Host was copied
	ends   []byte // of Host, while it is marked: see Outdate
	uses   [3]int // how many users have each Use, guarded by Copies.mu
}

// Outdate marks the first and the last element of the host's memory, since a machine has written
// Device: [Present] then says so. It returns false for integers, which cannot be marked.
func (c *Copy) Outdate() bool {
	if OnDevice.marks(c.Host) {
		return true
	}
	c.ends = c.ends[:0]
	for _, end := range c.hostEnds() {
		c.ends = append(c.ends, end.Bytes()...)
		OnDevice.fill(end)
	}
	return OnDevice.marks(c.Host)
}

// Unmark makes the host's memory what it was before Outdate.
func (c *Copy) Unmark() {
	for i, end := range c.hostEnds() {
		if OnDevice.marks(end) && len(c.ends) > 0 { // else the host has copied another tensor's
			copy(end.Bytes(), c.ends[i*end.NBytes():])
		}
	}
}

func (c *Copy) hostEnds() []backend.Buffer {
	n := c.Host.Len()
	return []backend.Buffer{c.Host.Slice(0, min(n, 1)), c.Host.Slice(max(n-1, 0), n)}
}

// Newer reports whether the copy of host memory has newer elements, which a machine has written.
func (s *Copies) Newer(host backend.Buffer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.all[host]
	return c != nil && c.uses[Writes] > 0 && c.Fresh
}

// Enter counts a user of host memory. Before the first that writes or holds, the host's elements
// count, and before the first that writes those that somebody has written since.
func (s *Copies) Enter(host backend.Buffer, use Use) *Copy {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.all[host]
	if c == nil {
		if s.all == nil {
			s.all = map[backend.Buffer]*Copy{}
		}
		c = &Copy{Host: host}
		s.all[host] = c
	}
	if use != Reads && !c.held() || use == Writes && c.uses[Writes] == 0 && !c.source.Current() {
		c.Fresh = false
	}
	c.uses[use]++
	return c
}

// Leave ends what Enter began. After the last writer the host's elements count. It returns the
// device's memory, for the last user to free.
func (s *Copies) Leave(c *Copy, use Use) (unused backend.Buffer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.uses[use]--
	if use != Reads && (!c.held() || c.uses[use] == 0 && use == Writes) {
		c.Fresh = false
	}
	if use == Writes && c.uses[Writes] == 0 {
		c.Unmark()
	}
	if c.uses != [3]int{} {
		return backend.Buffer{}
	}
	delete(s.all, c.Host)
	return c.Device
}

// held reports whether a user writes or holds the copy.
func (c *Copy) held() bool { return c.uses[Writes]+c.uses[Holds] > 0 }

// Stays reports whether the copy pays: if a user writes or holds it, or there are several. Else its
// only user has the elements among its other inputs.
func (s *Copies) Stays(c *Copy) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.held() || c.uses[Reads] > 1
}

// Written reports whether a user writes the copy, so that the host's elements do not count until
// they are given back to it.
func (s *Copies) Written(c *Copy) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.uses[Writes] > 0
}

// Held reports whether a user writes or holds the copy, so that runs do not compare it with what
// the host has.
func (s *Copies) Held(c *Copy) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.held()
}

// Current reports whether a copy has the present elements, unless only Reads use it, which compare.
func (s *Copies) Current(c *Copy) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return c.Fresh && (c.uses[Writes] > 0 || c.uses[Holds] > 0 && c.source.Current())
}

// Source returns what a copy is about to get from the host, for Send.
func (s *Copies) Source(c *Copy) (of Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.uses[Holds] > 0 {
		of = Read(c.Host)
	}
	return of
}

// Send notes that a copy gets what the host had at Source.
func (s *Copies) Send(c *Copy, of Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Fresh, c.source = true, of
	if !c.held() {
		c.Sent = append(c.Sent[:0], c.Host.Bytes()...)
	}
}

// Abandon takes what closes a machine that nobody refers to, for the next CloseAbandoned.
func (s *Copies) Abandon(close func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.abandoned = append(s.abandoned, close)
}

// CloseAbandoned closes the machines that Abandon was told of.
func (s *Copies) CloseAbandoned() (err error) {
	s.mu.Lock()
	all := s.abandoned
	s.abandoned = nil
	s.mu.Unlock()
	for _, close := range all {
		err = errors.Join(err, close())
	}
	return err
}
