//go:build !linux || portable

package shm

import (
	"crypto/rand"
	"fmt"
	"sync"
	"unsafe"
)

// BetweenProcesses says that processes can share memory, and not only goroutines.
const BetweenProcesses = false

// pageBytes is how memory is aligned.
const pageBytes = 4096

// offers has the memory that ranks of this process offer each other, until Release. Between ranks
// goes its name alone, as between processes, so it belongs to the process.
var offers sync.Map // from Offer to []byte

// Share is a piece of memory that goroutines share.
type Share struct {
	Mem   []byte
	offer Offer // "" where it is not offered
}

// New makes nbytes of zeroed memory. The directory has no meaning.
func New(dir string, nbytes int) (*Share, error) {
	all, err := Total()
	if err != nil {
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	if nbytes < 0 || uint64(nbytes) > all {
		return nil, fmt.Errorf("shared memory: cannot reserve %d bytes: this machine has %d",
			nbytes, all)
	}
	mem := make([]byte, nbytes+pageBytes-1)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(mem))) % pageBytes)
	return &Share{Mem: mem[skip : skip+nbytes : skip+nbytes]}, nil
}

// RoomOf says that there is no such file system.
func RoomOf(dir string) (Room, error) { return Room{}, ErrProcesses }

// Offer is what another goroutine of the process needs to reach a Share: a name that nobody else
// has.
type Offer string

// Offer returns the Offer of a Share, which is valid until Release.
func (s *Share) Offer() (Offer, error) {
	if s.offer == "" {
		s.offer = Offer(rand.Text())
		offers.Store(s.offer, s.Mem)
	}
	return s.offer, nil
}

// Open returns what is offered. The error is ErrProcesses in another process.
func (o Offer) Open(nbytes int) (*Share, error) {
	mem, ok := offers.Load(o)
	if !ok {
		return nil, ErrProcesses
	}
	return &Share{Mem: mem.([]byte)[:nbytes]}, nil
}

// OpenNamed returns ErrProcesses: memory has no names in a directory.
func (o Offer) OpenNamed(path string, nbytes int) (*Share, error) { return nil, ErrProcesses }

// Link returns ErrProcesses: memory has no names in a directory.
func (s *Share) Link(dir string) (name string, err error) { return "", ErrProcesses }

// Release ends the offer; the memory stays.
func (s *Share) Release() {
	if s.offer != "" {
		offers.Delete(s.offer)
		s.offer = ""
	}
}

// Retire gives the memory up although it may still be in use: it is freed when no rank has it any
// more.
func (s *Share) Retire() error {
	s.Release()
	return nil
}

// Discard zeroes whole pages of a Share. They are freed with it.
func Discard(pages []byte) error {
	clear(pages)
	return nil
}

// Unmap gives up the memory. Nothing may use it afterwards.
func (s *Share) Unmap() error {
	s.Release()
	s.Mem = nil
	return nil
}
