// Package checkpoint keeps checkpoints in a directory that is the user's. It handles files and
// names, and knows nothing of tensors. docs/checkpoints.md says what users may rely on.
//
// A Save calls [Acquire], [Clean], [Begin], then [WriteFile] for each file, on any rank, and
// [Commit]; then [Prune]. Between Begin and Commit the files are in a [Draft], a directory with
// the id of the Save in its name. One rename by Commit makes it a checkpoint. [Discard] removes a
// draft.
//
// Load calls [List] and takes the first whole [Entry]. [Open] opens one of its files.
//
// Three rules keep the user's files:
//   - Commit renames to a name that does not exist.
//   - What is removed was made by Save, and says so: a draft contains a marker or a record with the
//     id in its name; a checkpoint's record has its training and its name, and lists every file.
//   - Files are removed one by one, by the names that Save gives, and then the empty directory.
//     Symlinks are not followed.
package checkpoint
