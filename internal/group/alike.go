package group

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// OverComm returns the Gatherer of the ranks of a communicator, by its all-gathers. All notes of a
// round have the same length: see [FramedOver].
func OverComm(comm backend.Communicator) Gatherer {
	return func(note []byte) ([][]byte, error) {
		all := make([]byte, comm.Size()*len(note))
		c := backend.Collective{Kind: backend.AllGather}
		if err := RunOnHost(comm, c, backend.Of(all), backend.Of(note)); err != nil {
			return nil, err
		}
		return slices.Collect(slices.Chunk(all, len(note))), nil
	}
}

// FramedOver is OverComm for notes of any lengths.
func FramedOver(comm backend.Communicator) Gatherer { return Framed(math.MaxInt, OverComm(comm)) }

// wrongPrefix begins the description of a rank that cannot continue.
const wrongPrefix = "error: "

// Alike returns an error on every rank unless all descriptions, which may have several lines, are
// the same and no rank has a problem. The error names the rank and what differs. A rank with a
// problem takes part, so that no rank waits for it. Alike also sends each rank's note and returns
// all notes, or none on a single rank. All notes have the same length.
//
// Ranks compare hashes, and exchange descriptions only if the hashes differ.
func Alike(comm backend.Communicator, description string, note []byte, wrong error) ([][]byte,
	error) {
	if comm.Size() == 1 {
		return nil, wrong
	}
	if wrong != nil {
		description = wrongPrefix + wrong.Error()
	}
	sum := sha256.Sum256([]byte(description))
	notes, err := OverComm(comm)(append(sum[:], note...))
	if err != nil {
		return nil, errors.Join(wrong, err)
	}
	first := notes[0][:len(sum)]
	differs := func(theirs []byte) bool { return !bytes.HasPrefix(theirs, first) }
	if !slices.ContainsFunc(notes, differs) {
		for r := range notes {
			notes[r] = notes[r][len(sum):]
		}
		return notes, wrong
	}
	texts, err := FramedOver(comm)([]byte(description))
	if err != nil {
		return nil, errors.Join(wrong, err)
	}
	return nil, disagreement(texts, comm.Rank(), wrong)
}

// disagreement returns an error that says what differs between ranks. wrong is the problem of
// rank mine, if it has one.
func disagreement(texts [][]byte, mine int, wrong error) error {
	lines := make([][]string, len(texts))
	for r, text := range texts {
		t := string(text)
		if why, bad := strings.CutPrefix(t, wrongPrefix); bad {
			if r == mine { // say it once
				return fmt.Errorf("rank %d cannot go on: %w", r, wrong)
			}
			return errors.Join(wrong, fmt.Errorf("rank %d cannot go on: %s", r, why))
		}
		lines[r] = strings.Split(strings.TrimSuffix(t, "\n"), "\n")
	}
	for r := range lines {
		for i := range max(len(lines[0]), len(lines[r])) {
			if a, b := lineOf(lines[0], i), lineOf(lines[r], i); a != b {
				return fmt.Errorf("%w: %s on rank 0, but %s on rank %d: give all ranks the same",
					backend.ErrMismatch, a, b, r)
			}
		}
	}
	return nil
}

func lineOf(lines []string, i int) string {
	if i >= len(lines) {
		return "nothing"
	}
	return lines[i]
}
