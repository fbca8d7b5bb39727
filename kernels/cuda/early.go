package cuda

import (
	"fmt"
	"strings"
)

// early returns a text for older devices as one for Hopper, whose kernels may be put on the
// multiprocessors before those launched before them have ended: as soon as all blocks of these
// have, or say that they may. They wait there, first of all, until all of that has ended and
// what it has written is there. A text for Hopper or newer says so itself.
//
// Back to back, copies, casts, packs and permutes of 16 MiB take 1.3 to 2 us less so, and are 10
// to 23 % faster, those of 64 MiB 2 to 11 %; to launch one takes the host up to 0.9 us less. If
// they let the next one in before they end, they are between 3 % faster and 15 % slower, which is
// permutes whose rows are not aligned (H200, bench/results/2026-11-22-h200-early.txt, -kernels.txt).
func early(text string) string {
	var b strings.Builder
	inEntry := false
	for line := range strings.Lines(text) {
		words, _, _ := strings.Cut(line, "//")
		words = strings.TrimSpace(words)
		var major, minor, target int
		switch {
		case strings.HasPrefix(line, ".version "):
			if _, err := fmt.Sscanf(words, ".version %d.%d", &major, &minor); err == nil && 10*major+minor < 78 {
				line = ".version 7.8\n" // the first one for Hopper
			}
		case strings.HasPrefix(line, ".target "):
			if _, err := fmt.Sscanf(words, ".target sm_%d", &target); err != nil || target >= Hopper {
				return text
			}
			line = strings.Replace(line, fmt.Sprintf("sm_%d", target), fmt.Sprintf("sm_%d", Hopper), 1)
		case strings.HasPrefix(line, entryMark):
			inEntry = true
		}
		b.WriteString(line)
		if inEntry && strings.HasSuffix(words, "{") {
			b.WriteString("\t" + wait + "\n")
			inEntry = false
		}
	}
	return b.String()
}

// What a kernel says that waits for those before it, and one that lets the next one in.
const (
	wait    = "griddepcontrol.wait;"
	release = "griddepcontrol.launch_dependents;"
)

// traits are those of a kernel that launches depend on.
type traits struct {
	early  bool // it may begin before those launched before it have ended
	admits bool // it may let the next one in before it ends
	peers  bool // it waits for kernels of other devices
}

// traitsOf reads them in what a text has of a kernel.
func traitsOf(body string) traits {
	return traits{strings.Contains(body, wait), strings.Contains(body, release), strings.Contains(body, ".sys.")}
}

// succession is what has been launched on a stream, as far as the next launch depends on it. The
// zero succession is that of a new stream.
type succession struct{ last traits }

// early reports whether a kernel is to begin early.
//
// Behind one that waits for peers and lets the next one in meanwhile, only those that wait for
// peers do: they have 128 blocks at most. A larger one would keep kernels of another group off
// the device, for which the same devices may be waiting in their turn.
func (s *succession) early(its traits) bool {
	return its.early && (its.peers || !(s.last.admits && s.last.peers))
}

// launched notes a launch. One of a kernel that waits for peers may have worked, although it
// was an error.
func (s *succession) launched(its traits, err error) {
	if err == nil || its.peers {
		s.last = its
	}
}

// forget is for work that was put on the stream, or was not, by other means.
func (s *succession) forget() { s.last = traits{admits: true, peers: true} }
