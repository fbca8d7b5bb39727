package cuda

import (
	"fmt"
	"slices"
	"strings"
)

// withPDL returns a text for older devices as one for Hopper whose kernels take part in
// programmatic dependent launch (PDL): the device may place such a kernel on its multiprocessors
// while the kernel before it on the stream still runs, as soon as every block of that one has
// ended or has executed launch_dependents. The first instruction of a kernel waits until all
// earlier kernels have ended and their writes are visible. A text for Hopper or newer has that
// instruction already.
//
// Back to back, PDL makes copies, casts and permutes faster, and takes less of the host's time for
// a launch. Kernels that execute launch_dependents before they end are mostly slower, so these do
// not (bench/results/2026-11/2026-11-22-h200-early.txt and 2026-11-22-h200-kernels.txt), except
// the small ones that are named: the next kernel finds room beside them, and may ask for memory.
func withPDL(text string, small ...string) string {
	var b strings.Builder
	inEntry, name := false, ""
	for line := range strings.Lines(text) {
		words, _, _ := strings.Cut(line, "//")
		words = strings.TrimSpace(words)
		var major, minor, target int
		switch {
		case strings.HasPrefix(line, ".version "):
			if _, err := fmt.Sscanf(words, ".version %d.%d", &major, &minor); err == nil &&
				10*major+minor < 78 {
				line = ".version 7.8\n" // the first one for Hopper
			}
		case strings.HasPrefix(line, ".target "):
			if _, err := fmt.Sscanf(words, ".target sm_%d", &target); err != nil ||
				target >= hopper {
				return text
			}
			line = strings.Replace(line, fmt.Sprintf("sm_%d", target),
				fmt.Sprintf("sm_%d", hopper), 1)
		case strings.HasPrefix(line, entryMark):
			inEntry = true
			name, _, _ = strings.Cut(line[len(entryMark):], "(")
		}
		b.WriteString(line)
		if inEntry && strings.HasSuffix(words, "{") {
			if slices.Contains(small, name) {
				b.WriteString("\t" + release + "\n")
			}
			b.WriteString("\t" + wait + "\n")
			inEntry = false
		}
	}
	return b.String()
}

// The instruction with which a kernel waits for the kernels before it, and the one with which
// it lets the next kernel start.
const (
	wait    = "griddepcontrol.wait;"
	release = "griddepcontrol.launch_dependents;"
)

// looks is what a kernel reads by whose blocks wait for each other.
const looks = "ld.relaxed.gpu.global.v4."

// traits are the properties of a kernel that decide how it may be launched.
type traits struct {
	pdl      bool // it may start before the kernels before it have ended
	releases bool // it may let the next kernel start before it ends
	peers    bool // it waits for kernels of other devices
	together bool // its blocks wait for each other, and must run at a time
}

// traitsOf finds them in the text of a kernel.
func traitsOf(body string) traits {
	return traits{strings.Contains(body, wait), strings.Contains(body, release),
		strings.Contains(body, ".sys."), strings.Contains(body, looks)}
}

// succession is what the next launch on a stream has to know of the launches before it. The
// zero succession belongs to a new stream.
type succession struct {
	last     traits
	separate bool // the next kernel waits for what is before it by a full dependency
}

// overlaps reports whether a kernel is launched with PDL.
//
// Behind a kernel that waits for peers and releases the next one, only kernels that wait for
// peers are: they have 128 blocks at most. A larger kernel could keep those of another group off
// the device, for which the same peers may be waiting in turn. A kernel whose blocks must run at a
// time is launched so, and not with PDL.
func (s *succession) overlaps(its traits) bool {
	return its.pdl && !its.together && !s.separate &&
		(its.peers || !(s.last.releases && s.last.peers))
}

// launched records a launch. A kernel that waits for peers counts even after an error, since it
// may be running.
func (s *succession) launched(its traits, err error) {
	s.separate = false
	if err == nil || its.peers {
		s.last = its
	}
}

// forgetLast is for work that came onto the stream by other means: nothing is known of it.
func (s *succession) forgetLast() { s.last = traits{releases: true, peers: true} }
