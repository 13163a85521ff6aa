//! Facts about the resume.
