package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// NoteBytes is the size of what ranks tell each other while they hand over
// shared memory.
const NoteBytes = 512

// Gatherer gives every rank the note of every rank.
type Gatherer func(note []byte) ([][]byte, error)

// HandOver maps nbytes of shared memory, made by rank leader in dir, on every
// rank, or fails on every rank. A rank that is its own leader and asks for
// nothing gets nothing, but takes part. Several groups may do so at once over
// one Gatherer, each with its leader.
func HandOver(gather Gatherer, leader, rank int, dir string, nbytes int) (*Share, error) {
	var s *Share
	var err error
	if leader == rank && nbytes > 0 {
		s, err = New(dir, nbytes)
	}
	notes, lost := gather(offer(s, err))
	if lost != nil {
		return nil, errors.Join(lost, discard(s))
	}
	if leader != rank {
		s, err = accept(notes[leader], leader, nbytes)
	}
	votes, lost := gather(offer(nil, err))
	if lost == nil {
		lost = firstFailure(votes)
	}
	if lost != nil {
		return nil, errors.Join(lost, discard(s))
	}
	if s != nil {
		s.release()
	}
	return s, nil
}

// A note is the process and the file of an offer, or the text of an error.

func offer(s *Share, err error) []byte {
	note := make([]byte, 8)
	switch {
	case err != nil:
		note = append(note, err.Error()...)
	case s != nil:
		binary.LittleEndian.PutUint32(note, uint32(os.Getpid()))
		binary.LittleEndian.PutUint32(note[4:], uint32(s.fd))
	}
	return note[:min(len(note), NoteBytes)]
}

func accept(note []byte, leader, nbytes int) (*Share, error) {
	if err := failed(note); err != nil {
		return nil, fmt.Errorf("rank %d made none: %w", leader, err)
	}
	pid, fd := binary.LittleEndian.Uint32(note), binary.LittleEndian.Uint32(note[4:])
	return open(int(pid), int(fd), nbytes)
}

// failed returns the error in a note.
func failed(note []byte) error {
	if text := bytes.TrimRight(note[8:], "\x00"); len(text) > 0 {
		return errors.New(string(text))
	}
	return nil
}

func firstFailure(votes [][]byte) error {
	for r, vote := range votes {
		if err := failed(vote); err != nil {
			return fmt.Errorf("rank %d failed: %w", r, err)
		}
	}
	return nil
}

func discard(s *Share) error {
	if s == nil {
		return nil
	}
	return s.Unmap()
}
