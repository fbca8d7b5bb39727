package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// NoteBytes is the size of what ranks tell each other while they hand over
// shared memory.
const NoteBytes = 512

// Gatherer gives every rank the note of every rank.
type Gatherer func(note []byte) ([][]byte, error)

// Group is the ranks that hand over, as one of them knows them.
type Group struct {
	Gather Gatherer
	Rank   int                // this one
	Name   func(r int) string // names a rank in errors: "rank 3"
	Dir    string             // the tmpfs
}

// HandOver maps nbytes of shared memory, made by rank leader, on every rank, or
// fails on every rank. A rank that is its own leader and asks for nothing gets
// nothing, but takes part. Several groups may do so at once over one Gatherer,
// each with its leader.
func (g Group) HandOver(leader, nbytes int) (*Share, error) {
	h := handover{Group: g, leader: leader, nbytes: nbytes}
	err := h.byProcess()
	if errors.Is(err, errUnseen) {
		err = h.byName()
	}
	if err != nil {
		return nil, errors.Join(err, discard(h.share))
	}
	if h.share != nil {
		h.share.release()
	}
	return h.share, nil
}

func discard(s *Share) error {
	if s == nil {
		return nil
	}
	return s.Unmap()
}

// handover is what one rank knows of it.
type handover struct {
	Group
	leader int
	nbytes int
	share  *Share
	file   identity // of the leader
}

// errUnseen says that a rank cannot open its leader's file through /proc.
var errUnseen = errors.New("the ranks do not see each other's processes")

// byProcess makes the memory, which the others open in the leader's process. Every rank
// has the same error.
func (h *handover) byProcess() error {
	var mine []byte
	var err error
	if h.leader == h.Rank && h.nbytes > 0 {
		if h.share, err = New(h.Dir, h.nbytes); err == nil {
			mine, err = offer(h.share.fd)
		}
	}
	theirs, lost := h.ask(mine, err)
	if lost != nil {
		return lost
	}
	if err = theirs.err; err == nil && h.leader != h.Rank {
		h.share, err = h.openOffer(theirs.text)
	}
	return h.vote(err)
}

// offer is the process, the descriptor and the identity of a file.
func offer(fd int) ([]byte, error) {
	id, err := identify(fd)
	note := binary.LittleEndian.AppendUint32(nil, uint32(os.Getpid()))
	note = binary.LittleEndian.AppendUint32(note, uint32(fd))
	note = binary.LittleEndian.AppendUint64(note, id.device)
	return binary.LittleEndian.AppendUint64(note, id.inode), err
}

func (h *handover) openOffer(note []byte) (*Share, error) {
	note = append(slices.Clip(note), make([]byte, 24)...) // zeros at the end were taken off
	pid, fd := binary.LittleEndian.Uint32(note), binary.LittleEndian.Uint32(note[4:])
	h.file = identity{binary.LittleEndian.Uint64(note[8:]), binary.LittleEndian.Uint64(note[16:])}
	s, err := open(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), h.file, h.nbytes)
	if err != nil {
		err = fmt.Errorf("%w: %w", errUnseen, err)
	}
	return s, err
}

// byName gives the memory a name in the directory while those open it that could not.
func (h *handover) byName() error {
	var name string
	var err error
	if h.leader == h.Rank && h.share != nil {
		if name, err = h.share.link(h.Dir); err == nil {
			defer os.Remove(filepath.Join(h.Dir, name))
		}
	}
	theirs, lost := h.ask([]byte(name), err)
	if lost != nil {
		return lost
	}
	if err = theirs.err; err == nil && h.leader != h.Rank && h.share == nil {
		h.share, err = open(filepath.Join(h.Dir, string(theirs.text)), h.file, h.nbytes)
		if err != nil {
			err = fmt.Errorf("%w: %w: they must share the directory (EURYALE_SHM_DIR) then", errUnseen, err)
		}
	}
	return h.vote(err)
}

// A note begins with what the rest is.
const (
	payload = iota
	failure // the text of an error
	unseen  // that of one that wraps errUnseen
)

// note is what a rank has told.
type note struct {
	text []byte
	err  error
}

// tell gathers mine or an error.
func (h *handover) tell(mine []byte, err error) ([]note, error) {
	kind := byte(payload)
	if err != nil {
		kind, mine = failure, []byte(err.Error())
	}
	if errors.Is(err, errUnseen) {
		kind = unseen
	}
	mine = append([]byte{kind}, mine...)
	all, err := h.Gather(mine[:min(len(mine), NoteBytes)])
	if err != nil {
		return nil, err
	}
	notes := make([]note, len(all))
	for r, theirs := range all {
		text := bytes.TrimRight(theirs[1:], "\x00")
		switch theirs[0] {
		case failure:
			notes[r].err = errors.New(string(text))
		case unseen:
			notes[r].err = told{string(text)}
		default:
			notes[r].text = text
		}
	}
	return notes, nil
}

// told is an error of another rank that wraps errUnseen there.
type told struct{ text string }

func (t told) Error() string { return t.text }
func (t told) Unwrap() error { return errUnseen }

// ask returns what this rank's leader tells.
func (h *handover) ask(mine []byte, err error) (note, error) {
	notes, lost := h.tell(mine, err)
	if lost != nil {
		return note{}, lost
	}
	theirs := notes[h.leader]
	if theirs.err != nil {
		theirs.err = fmt.Errorf("%s made none: %w", h.Name(h.leader), theirs.err)
	}
	return theirs, nil
}

// vote returns the first error of a rank, on every rank: one that another way may mend if
// there is no other.
func (h *handover) vote(mine error) error {
	votes, lost := h.tell(nil, mine)
	if lost != nil {
		return lost
	}
	var first error
	for r, v := range votes {
		if v.err != nil && (first == nil || errors.Is(first, errUnseen) && !errors.Is(v.err, errUnseen)) {
			first = fmt.Errorf("%s failed: %w", h.Name(r), v.err)
		}
	}
	return first
}
