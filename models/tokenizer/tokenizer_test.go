package tokenizer

import (
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// styles are the folders of testdata.
var styles = []string{"gpt2", "llama2", "llama3", "mistral", "qwen2", "tekken"}

// cases is what Hugging Face's tokenizers gives.
type cases struct {
	Texts      []string
	Tokenizers map[string]struct {
		Plain, Special [][]int
		Decoded        []decoded
	}
}

// decoded is ids with their texts.
type decoded struct {
	ids           []int
	skipped, text string
}

func (d *decoded) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &[]any{&d.ids, &d.skipped, &d.text})
}

func load(t testing.TB, dir string) *Tokenizer {
	t.Helper()
	return require.Value(Load(dir))(t)
}

// directories returns where cases are: testdata, and in a full test what its script makes now.
func directories(t testing.TB) []string {
	t.Helper()
	dirs := []string{"testdata"}
	if os.Getenv("EURYALE_FULL") != "1" {
		return dirs
	}
	if exec.Command("python3", "-c", "import tokenizers").Run() != nil {
		t.Log("python3 has no tokenizers: nothing is made anew")
		return dirs
	}
	dir := t.TempDir()
	text, err := exec.Command("python3", "testdata/make.py", dir).CombinedOutput()
	require.That(t, err == nil, "%v\n%s", err, text)
	return append(dirs, dir)
}

func readCases(t testing.TB, dir string) cases {
	t.Helper()
	f := require.Value(os.Open(filepath.Join(dir, "cases.json.gz")))(t)
	defer f.Close()
	z := require.Value(gzip.NewReader(f))(t)
	var c cases
	require.NoError(t, json.NewDecoder(z).Decode(&c))
	for i, text := range c.Texts {
		b := require.Value(base64.StdEncoding.DecodeString(text))(t)
		c.Texts[i] = string(b)
	}
	return c
}

func TestIDsAreThoseOfHuggingFace(t *testing.T) {
	for _, dir := range directories(t) {
		c := readCases(t, dir)
		for _, style := range styles {
			tok, want := load(t, filepath.Join(dir, style)), c.Tokenizers[style]
			require.That(t, len(want.Plain) == 1000 && len(want.Special) == 1000,
				"%s has %d and %d texts", style, len(want.Plain), len(want.Special))
			for i, text := range c.Texts {
				checkIDs(t, tok, text, false, want.Plain[i])
				checkIDs(t, tok, text, true, want.Special[i])
			}
		}
	}
}

func checkIDs(t *testing.T, tok *Tokenizer, text string, special bool, want []int) {
	t.Helper()
	if got := tok.Encode(text, special); !slices.Equal(got, want) {
		t.Errorf("%.80q is %v, want %v, with special tokens %v", text, got, want, special)
	}
}

func TestTextsAreThoseOfHuggingFace(t *testing.T) {
	for _, dir := range directories(t) {
		c := readCases(t, dir)
		for _, style := range styles {
			tok := load(t, filepath.Join(dir, style))
			for _, d := range c.Tokenizers[style].Decoded {
				require.Equal(t, fmt.Sprintf("%s: %v", style, d.ids), tok.Decode(d.ids, true),
					d.skipped)
				if got := tok.Decode(d.ids, false); got != d.text {
					t.Errorf("%s: %v is %q with special tokens, want %q", style, d.ids, got, d.text)
				}
			}
		}
	}
}

func TestStreamsGiveWholeCharactersAndTheTextOfDecode(t *testing.T) {
	c := readCases(t, "testdata")
	for _, style := range styles {
		tok := load(t, filepath.Join("testdata", style))
		s := tok.Stream(true)
		streamed := func(ids []int) string {
			var text strings.Builder
			for _, id := range ids {
				part := s.Next(id)
				require.Check(t, utf8.ValidString(part), "%s: %v streams %q", style, ids, part)
				text.WriteString(part)
			}
			return text.String() + s.End()
		}
		for _, ids := range c.Tokenizers[style].Special {
			got, want := streamed(ids), tok.Decode(ids, true)
			require.Check(t, got == want, "%s: %v streams %q, want %q", style, ids, got, want)
		}
		for _, d := range c.Tokenizers[style].Decoded {
			if got := streamed(d.ids); tok.decoder.bytes && got != d.skipped {
				t.Errorf("%s: %v streams %q, want %q", style, d.ids, got, d.skipped)
			}
		}
	}
}

// FuzzBytesComeBack: what has no normalizer and is on bytes loses nothing.
func FuzzBytesComeBack(f *testing.F) {
	for _, text := range readCases(f, "testdata").Texts {
		f.Add(text)
	}
	var toks []*Tokenizer
	for _, style := range []string{"gpt2", "llama3", "tekken", "qwen2"} {
		toks = append(toks, load(f, filepath.Join("testdata", style)))
	}
	f.Fuzz(func(t *testing.T, text string) {
		want := string([]rune(text))
		for i, tok := range toks {
			if i == 3 {
				want = nfc(want)
			}
			got := tok.Decode(tok.Encode(text, false), false)
			require.Equal(t, fmt.Sprintf("%q comes back as", text), got, want)
		}
	})
}

// small are files that are read, on bytes and on characters.
var small = []string{`{"added_tokens":[{"id":3,"content":"<s>","rstrip":true,"special":true}],
"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split",
"behavior":"Isolated","pattern":{"Regex":"[^\\r\\n\\p{L}]?\\p{L}{1,3}|\\s+(?!\\S)|\\s+"}},
{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},"decoder":{"type":"ByteLevel"},
"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>"}},
{"Sequence":{"id":"A"}}],"special_tokens":{"<s>":{"ids":[3]}}},
"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}}`,
	`{"added_tokens":[{"id":2,"content":"<s>","single_word":true,"normalized":true}],
"normalizer":{"type":"Prepend","prepend":"_"},"pre_tokenizer":{"type":"Metaspace","split":false,
"replacement":"_","prepend_scheme":"first"},"decoder":{"type":"Sequence","decoders":[
{"type":"Replace","pattern":{"String":"_"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
{"type":"Strip","content":" ","start":1,"stop":0}]},"model":{"type":"BPE","unk_token":"_",
"fuse_unk":true,"vocab":{"_":0,"a":1},"merges":[]}}`}

func TestSmallFilesAreRead(t *testing.T) {
	for i, want := range [][]int{{3, 2, 3, 0}, {0, 1, 0, 0, 1}} {
		tok := load(t, folder(t, map[string]string{fileName: small[i]}))
		require.Slices(t, fmt.Sprint("file ", i), tok.Encode("ab<s> a", true), want)
	}
}

// FuzzFoldersAreReadOrRefused: no tokenizer.json panics, nor a text that it reads.
func FuzzFoldersAreReadOrRefused(f *testing.F) {
	for _, file := range small {
		f.Add(file, "a <s> b")
	}
	f.Fuzz(func(t *testing.T, file, text string) {
		tok, err := Load(folder(t, map[string]string{fileName: file}))
		if err == nil {
			tok.Decode(tok.Encode(text, true), true)
		}
	})
}

func Example() {
	tok, err := Load("testdata/llama3")
	if err != nil {
		fmt.Println(err)
		return
	}
	ids := tok.Encode("Hello, world!", true)
	fmt.Println(ids)
	fmt.Println(tok.Decode(ids, true))
	s := tok.Stream(true) // as they are generated
	for _, id := range ids {
		fmt.Print(s.Next(id), "|")
	}
	fmt.Println(s.End())
	// Output:
	// [640 39 68 408 78 11 283 263 75 67 0]
	// Hello, world!
	// |H|e|ll|o|,| w|or|l|d|!|
}
