package residence

import (
	"runtime"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/euryale-ml/euryale/backend"
)

// host is what is known of the memory of the host. It is a package variable since a process has one
// memory, whichever machines and devices it has.
var host struct {
	Copies // what machines on the host share

	mu       sync.RWMutex
	versions map[uintptr]weak.Pointer[version] // by address, of what has a Source
}

// version counts how often somebody has written the memory at an address.
type version struct {
	at     uintptr
	writes atomic.Uint64
}

// OnHost returns what machines on the host share.
func OnHost() *Copies { return &host.Copies }

// Source is a variable's memory on the host of which something was made that is kept: a copy on a
// device, or a value. Who writes the memory makes that stale by Write or Written, whichever machine
// of the process has it, on whichever device.
type Source struct {
	Memory  backend.Buffer
	version *version
	seen    uint64
}

// Read returns memory as a Source, before somebody reads it.
func Read(memory backend.Buffer) Source {
	host.mu.Lock()
	defer host.mu.Unlock()
	at := memory.Addr()
	v := host.versions[at].Value()
	if v == nil {
		v = &version{at: at}
		if host.versions == nil {
			host.versions = map[uintptr]weak.Pointer[version]{}
		}
		host.versions[at] = weak.Make(v)
		runtime.AddCleanup(v, forgetVersion, at)
	}
	return Source{memory, v, v.writes.Load()}
}

// forgetVersion removes the version of memory of which there is no Source any more.
func forgetVersion(at uintptr) {
	host.mu.Lock()
	defer host.mu.Unlock()
	if host.versions[at].Value() == nil {
		delete(host.versions, at)
	}
}

// Current reports whether nobody has written the memory since Read.
func (s Source) Current() bool { return s.version != nil && s.seen == s.version.writes.Load() }

// Write copies elements to the memory of a whole variable.
func Write(dst, src backend.Buffer) {
	copy(dst.Bytes(), src.Bytes())
	Written(dst)
}

// Written notes that somebody has written whole variables, given here, or parts of them: in their
// memory on the host, or for it on a device.
func Written(all ...backend.Buffer) {
	host.mu.RLock()
	defer host.mu.RUnlock()
	if len(host.versions) == 0 {
		return
	}
	for _, memory := range all {
		if v := host.versions[memory.Addr()].Value(); v != nil {
			v.writes.Add(1)
		}
	}
}
